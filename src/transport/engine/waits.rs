// SPDX-License-Identifier: MIT OR Apache-2.0
//! The wait of a rank, and its texts.

use std::{
    format,
    string::{String, ToString},
};

use super::{super::Label, contract::MessageDirection, packets::running, verdict::WaitState};

pub(super) const MAKING: Label = Label::new("making the transport", 0);

/// The wait of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) label: Label,
    /// None while the group is being made.
    pub(super) of: Option<(MessageDirection, usize)>,
    pub(super) bytes: usize,
}

impl Wait {
    pub(super) const MEETING: Self = Self { label: MAKING, of: None, bytes: 0 };

    pub(super) fn said(&self) -> WaitState {
        let Label { operation, step, run } = self.label;
        let (call, doing) = match self.of {
            None => (operation.to_string(), "connecting"),
            Some((way, _)) => (format!("{operation}, step {step}"), doing(way)),
        };
        let peer = self.of.map(|(_, peer)| peer);
        WaitState { call, doing: doing.to_string(), peer, bytes: self.bytes as u64, run: running(run) }
    }

    /// The text of an error if it fails.
    pub(super) fn failed(&self) -> String {
        let (doing, peer) = self.of.map_or(("connecting", 0), |(way, peer)| (doing(way), peer));
        format!("{doing} {} bytes, rank {peer} failed or did not answer", self.bytes)
    }
}

fn doing(way: MessageDirection) -> &'static str {
    match way {
        MessageDirection::Send => "sending",
        MessageDirection::Receive => "receiving",
    }
}
