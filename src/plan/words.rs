// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings in words, as explanations and errors print them. A setting that has its default value is left out.
//!
//! Long lists are printed as 32-bit fingerprints: two ranks that print the same number have the same list.

use alloc::{
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};

use crate::batch::Side;

use super::{Fingerprint, Problem, problem::inverse_sqrt};
#[cfg(feature = "std")]
use super::{Options, Plan, problem::AttentionKind};

/// Up to this many tokens a side a mask is drawn.
const PICTURED: usize = 64;

/// Up to this many slopes are printed one by one.
const SLOPES: usize = 8;

fn short(fold: impl FnOnce(&mut Fingerprint)) -> String {
    let mut fingerprint = Fingerprint::new();
    fold(&mut fingerprint);
    format!("{:08x}", fingerprint.finish() as u32)
}

impl Problem {
    /// The mask.
    pub(crate) fn mask_words(&self) -> String {
        match (self.mask.left, self.mask.right) {
            (None, None) => "full".to_string(),
            (None, Some(0)) => "causal".to_string(),
            (left, right) => {
                let side = |x: Option<u32>| x.map_or("open".to_string(), |n| n.to_string());
                format!("window {} back, {} ahead", side(left), side(right))
            }
        }
    }

    /// The mask as text: a row for each query, `#` for a key that it attends to and `.` for another one. `None` with
    /// more than 64 tokens of q or of k.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Problem, slices};
    /// // Two answers to one prompt, each with positions of its own.
    /// let batch = Batch::new(&[0, 5])?.with_slices(&slices::shared_prefix(2, &[2, 1]))?;
    /// let problem = Problem::new(batch, 1, 1, 64, Dtype::Bf16);
    /// assert_eq!(problem.picture().as_deref(), Some("#....\n##...\n###..\n####.\n##..#"));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn picture(&self) -> Option<String> {
        let batch = self.batch();
        let [n_q, n_k] = [Side::Q, Side::K].map(|side| batch.tokens(side));
        if n_q > PICTURED || n_k > PICTURED {
            return None;
        }
        let allowed = self.allowed();
        let mut rows = Vec::new();
        for d in 0..batch.documents() {
            let q = batch.whole(Side::Q, d);
            for pos in (0..q.len).map(|i| q.position(i)) {
                let mut row = vec!['.'; n_k];
                for of in allowed.of(Side::Q, d as u32) {
                    let (begin, end) = of.limits.keys(pos, (i64::MAX, i64::MAX));
                    let keys = batch.document(Side::K, of.document as usize);
                    let inside = |position: i64| position.clamp(0, keys.len() as i64) as usize;
                    let (begin, end) = (inside(begin), inside(end));
                    row[keys][begin..end.max(begin)].fill('#');
                }
                rows.push(row.into_iter().collect::<String>());
            }
        }
        Some(rows.join("\n"))
    }

    /// Scale, softcap, ALiBi slopes, sinks and dropout, each behind a comma.
    pub(crate) fn score_words(&self) -> String {
        let default = inverse_sqrt(self.head_dim() as f64);
        let scale = self.scale.filter(|s| *s != default).map_or(String::new(), |s| format!(", scale {s:?}"));
        let softcap = self.softcap.map_or(String::new(), |cap| format!(", softcap {cap}"));
        let alibi = match self.alibi_slopes() {
            None => String::new(),
            Some(slopes) => {
                let of = if self.alibi_per_document() { " per document" } else { "" };
                match slopes {
                    few if few.len() <= SLOPES => format!(", ALiBi slopes{of} {few:?}"),
                    _ => {
                        let all = short(|f| slopes.iter().for_each(|s| f.word(s.to_bits().into())));
                        let (first, last) = (slopes[0], slopes[slopes.len() - 1]);
                        format!(", ALiBi slopes{of} {first:?} to {last:?} (fingerprint {all})")
                    }
                }
            }
        };
        let sinks = match self.sinks_per_head() {
            0 => String::new(),
            1 => ", sinks".into(),
            n => format!(", {n} sinks per head"),
        };
        let dropout = self.dropout().map_or(String::new(), |probability| format!(", dropout {probability}"));
        format!("{scale}{softcap}{alibi}{sinks}{dropout}")
    }
}

#[cfg(feature = "std")]
impl Options {
    /// The options that all ranks must give alike, each behind a comma; without `ranks_per_node`.
    fn describe_settings(&self) -> String {
        let words = |o: &Self| {
            [
                ("gather", format!("{:?}", o.gather)),
                ("passes", o.passes.to_string()),
                ("circulate", format!("{:?}", o.circulate)),
                ("circulate_forward", format!("{:?}", o.circulate_forward)),
                ("wire", format!("{:?}", o.wire)),
                ("reproducible", o.reproducible.to_string()),
                ("key_rows", format!("{:?}", o.key_rows)),
            ]
        };
        let differ = words(self).into_iter().zip(words(&Self::default())).filter(|(own, default)| own != default);
        differ.map(|((name, value), _)| format!(", {name} {}", value.to_lowercase())).collect()
    }
}

#[cfg(feature = "std")]
impl Plan {
    /// What the [fingerprint](Self::fingerprint) is made of, but for mesh, layout and nodes: two ranks whose
    /// fingerprints differ see in these words where.
    pub(crate) fn describe_settings(&self) -> String {
        let p = self.problem();
        let documents = short(|f| f.batch(p.batch()));
        let slices = p.batch().slices().map_or(String::new(), |slices| {
            format!(", {} slices with fingerprint {}", slices.len(), short(|f| f.slices(p.batch())))
        });
        let kind = if p.kind() == AttentionKind::Softmax { "" } else { ", mixing of another kind" };
        let chunks = self.shares().deal().map_or(String::new(), |deal| {
            format!(", chunks with fingerprint {}", short(|f| deal.iter().for_each(|&c| f.word(c.into()))))
        });
        format!(
            "documents with fingerprint {documents}{slices}, heads {}, kv_heads {}, head_dim {}, value_dim {}, dtype {}, mask {}{}{kind}{chunks}{}",
            p.heads(),
            p.kv_heads(),
            p.head_dim(),
            p.value_dim(),
            p.dtype(),
            p.mask_words(),
            p.score_words(),
            self.options().describe_settings(),
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::{Batch, Dtype, Layout, Mask, Mesh, Plan, Problem};

    /// Chunks that another mask has dealt are a part of the fingerprint, so they are in the words.
    #[test]
    fn chunks_of_another_plan_are_seen() {
        let full =
            Problem::new(Batch::from_lengths(&[90, 7, 31]).unwrap(), 4, 2, 16, Dtype::F32).with_mask(Mask::full());
        let window = full.clone().with_mask(Mask::sliding(9));
        let plan = |p: &Problem| Plan::new(p, Mesh::ring(3).unwrap(), Layout::Balanced { chunks: 4 }).unwrap();
        let (own, dealt) = (plan(&full), Plan::builder(&full).tokens_of(&plan(&window)).build().unwrap());
        assert_ne!(own.fingerprint(), dealt.fingerprint());
        let [own, dealt] = [own, dealt].map(|plan| plan.describe_settings());
        let cut = |words: &str| words.split_once(", chunks with fingerprint ").unwrap().0.to_owned();
        assert!(own != dealt && cut(&own) == cut(&dealt), "{own}\n{dealt}");
    }
}
