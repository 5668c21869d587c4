// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parameters of the kernels of `ptx/shared/tags.cu`, and the words that they write.

use super::{Addresses, BASES, Parameters, Tensor};
use crate::report::metadata;
use bytemuck::{Pod, Zeroable};

/// `Tag`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Tag {
    pub fingerprint: u64,
    pub run: u64,
    pub seal: u64,
}

/// `BeginRunParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct BeginRun {
    pub runs: u64,
    pub tags: u64,
    pub fingerprint: u64,
    pub tag_count: u32,
    pub unused: u32,
}

/// `Note`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Note {
    pub tag: u64,
    pub ours: u64,
    pub our_run: u64,
    pub theirs: u64,
    pub their_run: u64,
    pub is_tag: u64,
    pub written: u64,
}

/// `ArrivedRange`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct ArrivedRange {
    pub row: i64,
    pub bytes: u64,
    pub first_head: u32,
    pub base: u32,
}

/// `ArrivedParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Arrived {
    pub tags: u64,
    pub ranges: u64,
    pub disagreed: u64,
    pub note: u64,
    pub tags_begin: u32,
    pub tags_end: u32,
    pub range_count: u32,
    pub unused: u32,
    pub bases: [Tensor; BASES],
}

addresses! {
    BeginRun { metadata: [tags], ..Addresses::NONE }
    Arrived { metadata: [tags, ranges], bases: [bases], ..Addresses::NONE }
}

const _: () = {
    // Plans report these sizes as memory of a device.
    assert!(size_of::<Tag>() as u64 == metadata::TAG && size_of::<ArrivedRange>() as u64 == metadata::ARRIVED);
    assert!(size_of::<BeginRun>() == 32);
    assert!(size_of::<Note>() == 56);
    assert!(size_of::<Arrived>() == 384);
};
