// SPDX-License-Identifier: MIT OR Apache-2.0
//! The limits of a problem: what no mesh, layout or kernel has to look at again.

use alloc::format;

use super::{AttentionKind, Problem};
use crate::{
    call::check_probability,
    element::Dtype,
    error::{Error, Result},
};

impl Problem {
    /// Checks the problem.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] or [`Error::Unsupported`], which names the argument, the value found and the value expected.
    pub fn check(&self) -> Result<()> {
        let range = |name: &'static str, value: usize, max: usize| {
            if value == 0 || value > max {
                return Err(Error::invalid(name, value, format!("1 to {max}")));
            }
            Ok(())
        };
        range("heads", self.heads, 1 << 16)?;
        range("kv_heads", self.kv_heads, 1 << 16)?;
        range("head_dim", self.head_dim, Self::MAX_HEAD_DIM)?;
        range("value_dim", self.value_dim, Self::MAX_HEAD_DIM)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::invalid("heads", self.heads, format!("a multiple of kv_heads = {}", self.kv_heads)));
        }
        if self.sinks > Self::MAX_SINKS {
            return Err(Error::invalid("sinks", self.sinks, format!("0 to {} for each head", Self::MAX_SINKS)));
        }
        if self.kind == AttentionKind::Other && self.batch.slices().is_some() {
            let kind = "documents are mixed whole by the caller's kernel";
            return Err(Error::unsupported("slices with attention of kind other", kind, "leave the slices out"));
        }
        if let Some(probability) = self.dropout {
            check_probability(probability)?;
            if self.kind == AttentionKind::Other {
                let limit = "probabilities are the caller's kernel's";
                return Err(Error::unsupported("dropout with attention of kind other", limit, "leave it out"));
            }
        }
        // Kernels score in the accumulator: a number that is not finite there, or a cap that is 0 there, gives NaN.
        let acc = self.dtype.accumulator();
        let (least, most) = match acc {
            Dtype::F64 => (f64::MIN_POSITIVE, f64::MAX),
            _ => (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)),
        };
        if let Some(scale) = self.scale.filter(|scale| !(-most..=most).contains(scale)) {
            let expected = format!("a finite number, from {:e} to {most:e} ({acc})", -most);
            return Err(Error::invalid("scale", format!("{scale:?}"), expected));
        }
        if let Some(cap) = self.softcap.filter(|cap| !(least..=most).contains(cap)) {
            let expected = format!("a finite number above 0, from {least:e} to {most:e} ({acc})");
            return Err(Error::invalid("softcap", format!("{cap:?}"), expected).hint("leave it out for no cap"));
        }
        self.check_slopes()
    }

    /// One slope for each head, or for each document and head, that scores can be computed with.
    fn check_slopes(&self) -> Result<()> {
        let Some(slopes) = &self.alibi_slopes else { return Ok(()) };
        let (rows, heads) = (self.alibi_rows(), self.heads);
        if rows.checked_mul(heads) != Some(slopes.len()) {
            let expected = match self.alibi_per_document {
                true => format!("{rows} x {heads}: one for each of {rows} documents and each of {heads} q heads"),
                false => format!("{heads}: one for each q head"),
            };
            return Err(Error::invalid("alibi_slopes", format!("of length {}", slopes.len()), expected));
        }
        // The product of a steeper slope and a distance may not be finite in f32; NaN is outside the range too.
        match slopes.iter().enumerate().find(|&(_, &s)| !(-1e18..=1e18).contains(&s)) {
            Some((i, s)) => {
                let at = match self.alibi_per_document {
                    true => format!("alibi_slopes[{}][{}]", i / heads, i % heads),
                    false => format!("alibi_slopes[{i}]"),
                };
                Err(Error::invalid(at, format!("{s:e}"), "-1e18 to 1e18"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;
    use alloc::string::ToString;

    fn problem() -> Problem {
        Problem::new(Batch::new(&[0, 4]).unwrap(), 6, 3, 8, Dtype::F32)
    }

    #[test]
    fn refusals_name_the_argument_and_both_values() {
        let text = |p: Problem| p.check().unwrap_err().to_string();
        let mut p = problem();
        p.kv_heads = 4;
        assert_eq!(text(p), "heads is 6, expected a multiple of kv_heads = 4");
        let mut p = problem();
        p.head_dim = 0;
        assert_eq!(text(p), "head_dim is 0, expected 1 to 576");
        assert_eq!(text(problem().with_value_dim(577)), "value_dim is 577, expected 1 to 576");
        assert_eq!(
            text(problem().with_scale(f64::NAN)),
            "scale is NaN, expected a finite number, from -3.4028234663852886e38 to 3.4028234663852886e38 (f32)"
        );
        assert!(
            text(problem().with_softcap(0.0))
                .starts_with("softcap is 0.0, expected a finite number above 0, from 1.17549")
        );
        assert!(
            text(problem().with_softcap(1e300))
                .starts_with("softcap is 1e300, expected a finite number above 0, from 1.17549")
        );
        assert!(
            text(problem().with_softcap(1e-42))
                .starts_with("softcap is 1e-42, expected a finite number above 0, from 1.17549")
        );
        assert!(
            text(problem().with_scale(-1e39)).starts_with("scale is -1e39, expected a finite number, from -3.40282")
        );
        let double = |p: Problem| Problem { dtype: Dtype::F64, ..p };
        double(problem().with_softcap(1e300).with_scale(-1e39)).check().unwrap();
        assert!(
            text(double(problem().with_softcap(1e-310)))
                .starts_with("softcap is 1e-310, expected a finite number above 0, from 2.22507")
        );
        assert_eq!(
            text(problem().with_alibi_slopes(&[1.0])),
            "alibi_slopes is of length 1, expected 6: one for each q head"
        );
        assert!(
            text(problem().with_alibi_slopes(&[1.0, 1.0, f32::INFINITY, 1.0, 1.0, 1.0]))
                .starts_with("alibi_slopes[2] is inf")
        );
        for slope in [1e30, -1e30, f32::MAX, f32::NAN] {
            let text = text(problem().with_alibi_slopes(&[1.0, slope, 1.0, 1.0, 1.0, 1.0]));
            assert_eq!(text, format!("alibi_slopes[1] is {slope:e}, expected -1e18 to 1e18"));
        }
        problem().with_alibi_slopes(&[1e18; 6]).check().unwrap();
        problem().check().unwrap();
    }
}
