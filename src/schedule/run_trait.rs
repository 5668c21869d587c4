// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a run may have, and what of it does not go together: one table for both kinds of memory, the refusals of a run
//! and the table of support in `docs/support.md`.
//!
//! An option of a run has a row here: what no pair of the table names is honoured in every mode. A pair stands once,
//! and is refused before a run touches anything. Limits of numbers (head dims, rows, element types) and of a schedule's
//! form (a plan that sends k over a ring) are refused where they are known.

use alloc::{format, string::String};

use super::{Direction, Purpose};
use crate::{
    error::{Error, Result},
    plan::Plan,
};

/// Something that a run has, by its plan, its call or where it executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunTrait {
    /// It is a backward.
    Backward,
    /// It is an all-to-all.
    AllToAll,
    /// It is a combine.
    Combine,
    /// It is a scan.
    Scan,
    /// Its tensors are in the memory of a device.
    Device,
    /// It becomes part of a CUDA graph.
    Capture,
    /// The plan gives the same bits on every mesh.
    Reproducible,
    /// The plan's batch has slices.
    Slices,
    /// The plan has ALiBi slopes of each document.
    SlopesOfDocuments,
    /// The plan has dropout.
    Dropout,
    /// k and v lie in pages.
    Pages,
    /// Each token lists its keys.
    KeyIndices,
    /// lse is to base 2.
    LseBaseTwo,
    /// The largest scores are wanted.
    MaxLogit,
    /// A kernel of the caller's computes attention.
    OwnKernel,
}

/// The pairs that do not go together, each with the limit and the way out. The second of a pair is what the first is
/// refused in.
pub(crate) const CLASHES: [(RunTrait, RunTrait, &str, &str); 23] = {
    use RunTrait::{AllToAll, Backward, Capture, Combine, Device, Dropout, KeyIndices, Pages, Reproducible, Slices};
    use RunTrait::{LseBaseTwo, MaxLogit, OwnKernel, Scan, SlopesOfDocuments};
    const NO_KEYS: &str = "it has no keys";
    const OUR_KERNELS: &str = "use a rank with the library's own kernels, or leave it out";
    [
        (Pages, AllToAll, NO_KEYS, "leave pages out"),
        (Pages, Combine, NO_KEYS, "leave pages out"),
        (KeyIndices, AllToAll, NO_KEYS, "leave key_indices out"),
        (KeyIndices, Combine, NO_KEYS, "leave key_indices out"),
        (Pages, Scan, NO_KEYS, "leave pages out"),
        (KeyIndices, Scan, NO_KEYS, "leave key_indices out"),
        (
            Scan,
            Device,
            "no CUDA kernel joins states",
            "use a rank on the CPU, or execute the schedule with kernels of your own: in Python a context with kernels of PyTorch does",
        ),
        (
            Reproducible,
            Device,
            "the CUDA kernels do not align tiles to positions",
            "run it on the CPU, or plan without it: runs still repeat bit for bit on one mesh",
        ),
        (
            SlopesOfDocuments,
            Device,
            "the CUDA kernels take one slope for each head",
            "give [heads] slopes for all documents, or use a rank on the CPU",
        ),
        (KeyIndices, Device, "no CUDA kernel attends to listed keys", "use a rank on the CPU"),
        (
            KeyIndices,
            Slices,
            "a position is that of a key in the token's document",
            "give documents alone, and list the keys that the slices allow",
        ),
        (
            KeyIndices,
            Reproducible,
            "its backward sends q to the keys, without the lists",
            "plan without reproducible: a run repeats bit for bit on the same mesh all the same",
        ),
        (Backward, Pages, "gradients of k and v have no pages", "gather k and v for a backward"),
        (
            Dropout,
            Pages,
            "a row that is found through a table does not say the place of its token",
            "plan without dropout, or gather the pages into k and v",
        ),
        (LseBaseTwo, AllToAll, "it has no lse", "leave lse_base out"),
        (LseBaseTwo, Scan, "it has no lse", "leave lse_base out"),
        (
            LseBaseTwo,
            Device,
            "the CUDA kernels read and write natural logarithms",
            "leave lse_base out, and multiply lse on the device: by log2(e) after a forward, by ln(2) before a backward",
        ),
        (
            Dropout,
            Capture,
            "a graph would keep the seed of dropout, and each replay drop the same pairs",
            "run plans with dropout outside of the capture",
        ),
        (Dropout, OwnKernel, "a kernel does not know which tokens its rows are", OUR_KERNELS),
        (Pages, OwnKernel, "rows are packed where they lie in k and v", OUR_KERNELS),
        (KeyIndices, OwnKernel, "a kernel takes rectangles of rows", OUR_KERNELS),
        (Reproducible, OwnKernel, "the order of a kernel's sums depends on its rows", OUR_KERNELS),
        (MaxLogit, OwnKernel, "a kernel returns o and lse alone", OUR_KERNELS),
    ]
};

impl RunTrait {
    /// Whether runs of a purpose over a plan have it; `false` for what the call and its rank decide.
    pub(crate) fn is_of(self, plan: &Plan, run: Purpose) -> bool {
        let p = plan.problem();
        let attention = matches!(run, Purpose::Attention(_));
        match self {
            Self::Backward => run == Purpose::Attention(Direction::Backward),
            Self::AllToAll => matches!(run, Purpose::AllToAll(_)),
            Self::Combine => matches!(run, Purpose::Combine(_)),
            Self::Scan => matches!(run, Purpose::Scan(_)),
            Self::Reproducible => attention && plan.options().reproducible,
            Self::Slices => attention && p.batch().slices().is_some(),
            Self::SlopesOfDocuments => attention && p.alibi_rows() > 1,
            Self::Dropout => attention && p.dropout().is_some(),
            Self::Device
            | Self::Capture
            | Self::Pages
            | Self::KeyIndices
            | Self::LseBaseTwo
            | Self::MaxLogit
            | Self::OwnKernel => false,
        }
    }

    /// It as what is refused.
    fn words(self, plan: &Plan) -> String {
        match self {
            Self::Backward => "a backward".into(),
            Self::AllToAll => "an all-to-all".into(),
            Self::Combine => "a combine".into(),
            Self::Scan => "a scan".into(),
            Self::Device => "a device".into(),
            Self::Capture => "a stream that is being captured".into(),
            Self::Reproducible => "reproducible".into(),
            Self::Slices => "slices".into(),
            Self::SlopesOfDocuments => format!("alibi_slopes of {} documents", plan.problem().alibi_rows()),
            Self::Dropout => format!("dropout {}", plan.problem().dropout().unwrap_or(0.0)),
            Self::Pages => "pages".into(),
            Self::KeyIndices => "key_indices".into(),
            Self::LseBaseTwo => "lse_base 2".into(),
            Self::MaxLogit => "max_logit".into(),
            Self::OwnKernel => "a kernel of the caller's".into(),
        }
    }

    /// It as what something else is refused in.
    const fn place(self) -> &'static str {
        match self {
            Self::Backward => "in a backward",
            Self::AllToAll => "in an all-to-all",
            Self::Combine => "in a combine",
            Self::Scan => "in a scan",
            Self::Device => "on a device",
            Self::Capture => "on a stream that is being captured",
            Self::Reproducible => "in a reproducible plan",
            Self::Slices => "in a batch with slices",
            Self::SlopesOfDocuments => "with alibi_slopes of documents",
            Self::Dropout => "with dropout",
            Self::Pages => "with pages",
            Self::KeyIndices => "with key_indices",
            Self::LseBaseTwo => "with lse_base 2",
            Self::MaxLogit => "with max_logit",
            Self::OwnKernel => "with a kernel of the caller's",
        }
    }
}

/// Refuses a run that has both of a pair of [`CLASHES`]. `has` says what it has beside what its plan and purpose say.
///
/// # Errors
/// [`Error::Unsupported`], which names both.
pub(crate) fn refuse_clashes(plan: &Plan, run: Purpose, has: &[Option<RunTrait>]) -> Result<()> {
    let has = |x: RunTrait| has.contains(&Some(x)) || x.is_of(plan, run);
    match CLASHES.iter().find(|(option, mode, ..)| has(*option) && has(*mode)) {
        None => Ok(()),
        Some((option, mode, limit, way_out)) => {
            Err(Error::unsupported(format!("{} {}", option.words(plan), mode.place()), limit, way_out))
        }
    }
}

#[cfg(test)]
mod tests;
