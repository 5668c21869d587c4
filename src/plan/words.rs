// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings in words, as explanations and errors print them. A setting that has its default value is left out.
//!
//! Long lists are printed as 32-bit fingerprints: two ranks that print the same number have the same list.

use alloc::{
    format,
    string::{String, ToString},
};

use super::{Fingerprint, Problem};

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

    /// Scale, softcap, ALiBi slopes and sinks, each behind a comma.
    pub(crate) fn score_words(&self) -> String {
        let default = Self { scale: None, ..self.clone() }.score().scale;
        let scale = self.scale.filter(|s| *s != default).map_or(String::new(), |s| format!(", scale {s:?}"));
        let softcap = self.softcap.map_or(String::new(), |cap| format!(", softcap {cap}"));
        let alibi = match self.alibi_slopes() {
            None => String::new(),
            Some(slopes) if slopes.len() <= SLOPES => format!(", ALiBi slopes {slopes:?}"),
            Some(slopes) => {
                let all = short(|f| slopes.iter().for_each(|s| f.word(s.to_bits().into())));
                format!(", ALiBi slopes {:?} to {:?} (fingerprint {all})", slopes[0], slopes[slopes.len() - 1])
            }
        };
        let sinks = if self.sinks() { ", sinks" } else { "" };
        format!("{scale}{softcap}{alibi}{sinks}")
    }
}
