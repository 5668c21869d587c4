// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a kernel can do, and the refusal of what it cannot: before anything moves, by the plan alone, so on all ranks
//! alike.

use alloc::{format, vec::Vec};

use crate::{
    element::Dtype,
    error::{Error, Result},
    plan::Plan,
};

/// What a kernel computes right; the rest is refused by name. Sinks, merges and the gradient of lse are computed
/// outside of it.
///
/// ```
/// use cpattn::{Dtype, kernel::varlen::Honours};
/// let mut honours = Honours::new(&[Dtype::F16, Dtype::Bf16], 256);
/// (honours.windows, honours.groups, honours.rounded_o) = (true, true, true);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Honours {
    /// Element types of q, k and v.
    pub dtypes: Vec<Dtype>,
    /// The largest dim of q, k and v.
    pub head_dim: u32,
    /// v's dim may differ from k's.
    pub value_dim: bool,
    /// Any window limits; else it is called with none, or 0 on the right.
    pub windows: bool,
    /// Softcap.
    pub softcap: bool,
    /// ALiBi slopes, of each sequence.
    pub alibi_slopes: bool,
    /// Several q heads for each kv head; else it gets a copy of k and v for each q head.
    pub groups: bool,
    /// It has a backward.
    pub backward: bool,
    /// It returns o in q's type. Each merge of a ring step then costs up to half a bit of that type.
    pub rounded_o: bool,
}

impl Honours {
    /// Causal and full attention of these types, forward alone, with o in the accumulator's type; the rest is to be
    /// set.
    pub fn new(dtypes: &[Dtype], head_dim: u32) -> Self {
        Self {
            dtypes: dtypes.to_vec(),
            head_dim,
            value_dim: false,
            windows: false,
            softcap: false,
            alibi_slopes: false,
            groups: false,
            backward: false,
            rounded_o: false,
        }
    }

    /// It as numbers.
    pub(super) fn words(&self) -> [u64; 3] {
        let types = self.dtypes.iter().fold(0, |set, &dtype| set | 1 << dtype as u64);
        let flags =
            [self.value_dim, self.windows, self.softcap, self.alibi_slopes, self.groups, self.backward, self.rounded_o];
        [types, self.head_dim.into(), flags.iter().enumerate().fold(0, |set, (i, &flag)| set | u64::from(flag) << i)]
    }

    /// Refuses a run of a plan that needs more.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names the option, its value and the kernel.
    pub(super) fn check(&self, kernel: &str, plan: &Plan, backward: bool) -> Result<()> {
        let p = plan.problem();
        let refused = |option: &str, limit: &str| {
            let option = format!("{option} with kernel {kernel:?}");
            Err(Error::unsupported(option, limit, "change it, or use a rank with the library's own kernels"))
        };
        if !self.dtypes.contains(&p.dtype()) {
            let names: Vec<_> = self.dtypes.iter().map(|dtype| dtype.name()).collect();
            return refused(&format!("dtype {}", p.dtype()), &format!("it takes {}", names.join(", ")));
        }
        for (name, dim) in [("head_dim", p.head_dim()), ("value_dim", p.value_dim())] {
            if dim > self.head_dim as usize {
                return refused(&format!("{name} {dim}"), &format!("it takes at most {}", self.head_dim));
            }
        }
        if p.head_dim() != p.value_dim() && !self.value_dim {
            let limit = format!("it takes value_dim = head_dim, which is {}", p.head_dim());
            return refused(&format!("value_dim {}", p.value_dim()), &limit);
        }
        let score = p.score();
        if score.softcap != 0.0 && !self.softcap {
            return refused(&format!("softcap {}", score.softcap), "it has no softcap");
        }
        if p.alibi_slopes().is_some() && !self.alibi_slopes {
            return refused("alibi_slopes", "it has no slopes");
        }
        if !self.windows {
            let limit = "it has no window limits, beside causal";
            if score.window_left != i64::MAX {
                return refused(&format!("window_left {}", score.window_left), limit);
            }
            if let Some(slice) = p.batch().slices().and_then(|all| all.iter().find(|slice| slice.low != i64::MIN)) {
                return refused(&format!("a slice with low {}", slice.low), limit);
            }
        }
        if backward && !self.backward {
            return refused("a backward", "it has none");
        }
        Ok(())
    }
}
