// SPDX-License-Identifier: MIT OR Apache-2.0
//! That no instruction is without a case.
//!
//! The opcodes with plain operands are the interpreter's own list. The others have a decoder each, and their forms are
//! listed here: who teaches a decoder a new one adds it, and then the table has to have it.

use crate::table;
use crate::table::case::{Float, Want};
use std::collections::{BTreeSet, HashMap};

/// Forms of the instructions that have decoders of their own; a case has to use an opcode that contains all the parts.
const FORMS: &[&str] = &[
    // Moves and addresses.
    "mov.pred",
    "cvta.global.u64",
    "cvta.to.global.u64",
    "cvta.shared.u64",
    "cvta.to.shared.u64",
    "cvta.local.u64",
    "cvta.to.local.u64",
    "cvta.const.u64",
    "cvta.param.u64",
    "cvta.to.param.u64",
    // Predicates and comparisons.
    "and.pred",
    "or.pred",
    "xor.pred",
    "not.pred",
    "setp.lt.and.s32",
    "setp.lt.or.s32",
    "setp.lt.xor.s32",
    "setp.eq.ftz.f32",
    "set.gt.u32.s32",
    "set.gt.s32.u32",
    "set.gt.f32.s32",
    "set.gt.and.u32.s32",
    "selp.b16",
    "selp.f32",
    "selp.f64",
    "slct.b16.s32",
    "slct.f64.f32",
    // Memory.
    "ld.param.u8",
    "ld.param.v2.u32",
    "ld.const.u32",
    "ld.const.v2.u32",
    "ld.local.u32",
    "st.local.v2.u32",
    "ld.shared.s8",
    "ld.shared.v4.u32",
    "st.shared.v4.u32",
    "ld.global.v4.u8",
    "ld.global.v2.u64",
    "ld.u32",
    "st.u32",
    "ldu.global.u32",
    "ld.global.nc.u32",
    "ld.volatile.global.u32",
    "ld.relaxed.gpu.global.u32",
    "ld.acquire.gpu.global.u32",
    "st.volatile.global.u32",
    "st.relaxed.gpu.global.u32",
    "st.release.gpu.global.u32",
    "ld.global.ca.u32",
    "ld.global.cg.u32",
    "ld.global.cs.u32",
    "ld.global.lu.u32",
    "ld.global.cv.u32",
    "ld.global.L1::no_allocate.u32",
    "ld.global.L2::128B.u32",
    "st.global.wb.u32",
    "st.global.wt.u32",
    "prefetch.global.L1",
    "prefetchu.L1",
    // Atomics.
    "atom.global.add.u32",
    "atom.global.add.u64",
    "atom.global.exch.b32",
    "atom.global.exch.b64",
    "atom.global.cas.b32",
    "atom.global.cas.b64",
    "atom.global.and.b32",
    "atom.global.or.b64",
    "atom.global.xor.b32",
    "atom.global.min.u32",
    "atom.global.min.s64",
    "atom.global.max.u64",
    "atom.global.max.s32",
    "atom.global.inc.u32",
    "atom.global.dec.u32",
    "atom.global.add.f32",
    "atom.global.add.f64",
    "atom.global.add.noftz.f16x2",
    "atom.global.add.noftz.bf16x2",
    "atom.shared.add.u32",
    "atom.add.u32",
    "atom.acquire.gpu.global.add.u32",
    "atom.release.cta.global.add.u32",
    "atom.acq_rel.sys.global.add.u32",
    "red.global.add.u32",
    "red.shared.dec.u32",
    "red.global.add.v2.f32",
    "red.relaxed.gpu.global.add.v4.f32",
    "red.release.gpu.global.add.u32",
    // Exchanges.
    "shfl.sync.up.b32",
    "shfl.sync.down.b32",
    "shfl.sync.bfly.b32",
    "shfl.sync.idx.b32",
    "vote.sync.all.pred",
    "vote.sync.any.pred",
    "vote.sync.uni.pred",
    "vote.sync.ballot.b32",
    "activemask.b32",
    "match.any.sync.b32",
    "match.any.sync.b64",
    "match.all.sync.b32",
    "match.all.sync.b64",
    "redux.sync.add.u32",
    "redux.sync.add.s32",
    "redux.sync.min.u32",
    "redux.sync.max.u32",
    "redux.sync.min.s32",
    "redux.sync.max.s32",
    "redux.sync.and.b32",
    "redux.sync.or.b32",
    "redux.sync.xor.b32",
    "elect.sync",
    // Barriers and fences.
    "bar.warp.sync",
    "bar.sync",
    "barrier.sync",
    "barrier.cta.sync.aligned",
    "bar.arrive",
    "barrier.cta.arrive.aligned",
    "bar.red.popc.u32",
    "bar.red.and.pred",
    "bar.red.or.pred",
    "barrier.cta.red.aligned.or.pred",
    "membar.cta",
    "membar.gl",
    "membar.sys",
    "fence.acq_rel.cta",
    "fence.acq_rel.gpu",
    "fence.acq_rel.sys",
    "fence.sc.cta",
    "fence.sc.gpu",
    "fence.sc.sys",
    "barrier.cta.sync",
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.global",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.async.shared::cluster",
    "fence.acq_rel.cluster",
    "barrier.cluster.arrive",
    "barrier.cluster.arrive.aligned",
    "barrier.cluster.arrive.release",
    "barrier.cluster.arrive.relaxed.aligned",
    "barrier.cluster.wait",
    "barrier.cluster.wait.acquire.aligned",
    // Addresses in other blocks of a cluster, and stores there.
    "mapa.shared::cluster.u32",
    "mapa.shared::cluster.u64",
    "getctarank.shared::cluster.u32",
    "getctarank.shared::cluster.u64",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    "griddepcontrol.launch_dependents",
    "griddepcontrol.wait",
    // Barriers in shared memory.
    "mbarrier.init.shared.b64",
    "mbarrier.init.shared::cta.b64",
    "mbarrier.inval.shared.b64",
    "mbarrier.expect_tx.relaxed.cta.shared.b64",
    "mbarrier.arrive.b64",
    "mbarrier.arrive.shared.b64",
    "mbarrier.arrive.release.cta.shared::cta.b64",
    "mbarrier.arrive.shared::cluster.b64",
    "mbarrier.arrive.release.cluster.shared::cluster.b64",
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
    "mbarrier.arrive.expect_tx.shared.b64",
    "mbarrier.test_wait.shared.b64",
    "mbarrier.test_wait.parity.shared.b64",
    "mbarrier.try_wait.shared.b64",
    "mbarrier.try_wait.parity.b64",
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64",
    // Bulk copies.
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint",
    "cp.async.bulk.global.shared::cta.bulk_group",
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint",
    "cp.async.bulk.prefetch.L2.global",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "cp.async.bulk.wait_group.read",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32",
    "createpolicy.fractional.L2::evict_last.b64",
    "createpolicy.fractional.L2::evict_normal.b64",
    "createpolicy.fractional.L2::evict_first.b64",
    "createpolicy.fractional.L2::evict_unchanged.b64",
    "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64",
    "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
    "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group",
    "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group",
    "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group",
    "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group",
    "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group.L2::cache_hint",
    "cp.async.bulk.prefetch.tensor.2d.L2.global",
    "cp.async.bulk.prefetch.tensor.5d.L2.global",
    "prefetch.tensormap",
    // Products of warpgroups.
    "wgmma.fence.sync.aligned",
    "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    // Copies and matrices.
    "cp.async.ca.shared.global",
    "cp.async.cg.shared.global",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16",
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16",
    "movmatrix.sync.aligned.m8n8.trans.b16",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    // Control.
    "bra",
    "bra.uni",
    "brx.idx",
    "brx.idx.uni",
    "ret",
    "ret.uni",
    "exit",
    "nanosleep.u32",
];

/// The opcodes a kernel uses.
fn used(ptx: &str, into: &mut BTreeSet<String>) {
    for statement in ptx.split(['\n', ';', '{', '}']) {
        let mut words = statement.split_whitespace().skip_while(|w| w.starts_with('@') || w.ends_with(':'));
        if let Some(word) = words.next() {
            into.insert(word.to_owned());
        }
    }
}

#[test]
fn every_instruction_has_a_case() {
    let mut have = BTreeSet::new();
    for case in table::all() {
        used(&case.ptx(), &mut have);
    }
    let forms = FORMS.iter().map(|f| (*f).to_owned());
    let missing: Vec<String> =
        cuda_emulator::opcodes().into_iter().chain(forms).filter(|op| !have.contains(op)).collect();
    assert!(missing.is_empty(), "{} without a case: {missing:#?}", missing.len());
}

#[test]
fn no_case_is_there_twice_and_each_asks_for_something() {
    let mut seen = HashMap::new();
    for case in table::all() {
        let what = format!("{}: {}", case.family, case.name);
        assert!(!case.shown(&case.buffer()).is_empty(), "{what}");
        assert!(case.runs_on(90) && (case.specific || case.runs_on(100)), "{what}");
        if let Some(other) = seen.insert(case.digest(), what.clone()) {
            panic!("{what} is {other} again");
        }
    }
}

#[test]
fn what_a_slot_accepts() {
    let near = Want::Near(Float::F32, 1.0, 1e-6);
    for (x, ok) in [(1.0f32, true), (1.0 + 8e-7, true), (1.0 + 2e-6, false), (-1.0, false), (f32::NAN, false)] {
        assert_eq!(near.accepts(x.to_bits().into()), ok, "{x}");
    }
    assert!(Want::Bits(0x8000_0000).accepts(0x8000_0000) && !Want::Bits(0x8000_0000).accepts(0));
    let nans = [(Float::F16, 0x7c01, 0x7c00), (Float::Bf16, 0xffff, 0xff80), (Float::F32, 0x7fff_ffff, 0x7f80_0000)];
    for (float, nan, infinity) in nans {
        assert!(Want::Nan(float).accepts(nan) && !Want::Nan(float).accepts(infinity), "{float:?}");
    }
    for (float, bits, value) in [
        (Float::F16, 0x3e00, 1.5),
        (Float::F16, 0x8001, -(2f64.powi(-24))),
        (Float::F16, 0x7bff, 65504.0),
        (Float::Bf16, 0x0001, 2f64.powi(-133)),
        (Float::Bf16, 0xc040, -3.0),
        (Float::F64, 0x3ff8 << 48, 1.5),
    ] {
        assert_eq!(float.value(bits), value, "{float:?} {bits:x}");
    }
}
