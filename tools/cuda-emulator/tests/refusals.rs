// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the interpreter does not execute it refuses when a module is read, by name and line: an instruction executed
//! almost right would be worse than none.

use cuda_emulator::Module;

/// A module whose sixth line is `line`.
fn module(line: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() {{\n.reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .f32 %f<9>; .reg .pred %p<3>;\n\
         {line}\nret;\n}}"
    )
}

#[track_caller]
fn refused(line: &str, what: &str) {
    let Err(e) = Module::parse(&module(line)) else { panic!("{line} was accepted") };
    assert_eq!(e.line, 6, "{e}");
    assert!(e.to_string().contains(what), "{line}: `{what}` is not in `{e}`");
}

#[test]
fn what_only_later_devices_have() {
    for (line, what) in [
        // Products of other formats, sparse ones, shapes that there are none of.
        ("wgmma.fence.sync;", "`wgmma.fence.sync`"),
        ("wgmma.wait_group.sync.aligned;", "`wgmma.wait_group.sync.aligned`"),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "`wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1;",
            "`wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32`",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "N a multiple of 8 up to 256",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            "4 and 0 registers, expected 8",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, {%r1, %r2}, %rd2, 1, 1, 1, 0;",
            "4 and 2 registers, expected 4 and 4",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1;",
            "2 numbers after `scale-d`, expected 4",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 2, 1, 0, 0;",
            "scales are 1 or -1, transposes 0 or 1",
        ),
        // Barriers: forms that nothing here uses.
        ("mbarrier.arrive.shared::cluster.b64 %rd2, [%r1];", "`mbarrier.arrive.shared::cluster.b64`"),
        ("mbarrier.arrive_drop.shared.b64 %rd2, [%r1];", "`mbarrier.arrive_drop.shared.b64`"),
        ("mbarrier.arrive.noComplete.shared.b64 %rd2, [%r1], 2;", "`mbarrier.arrive.noComplete.shared.b64`"),
        ("mbarrier.expect_tx.relaxed.cluster.shared.b64 [%r1], 16;", "`mbarrier.expect_tx.relaxed.cluster.shared.b64`"),
        ("mbarrier.arrive.relaxed.cta.shared.b64 _, [%r1];", "`mbarrier.arrive.relaxed.cta.shared.b64`"),
        ("mbarrier.pending_count.b64 %r1, %rd1;", "`mbarrier.pending_count.b64`"),
        ("mbarrier.complete_tx.shared.b64 [%r1], 16;", "`mbarrier.complete_tx.shared.b64`"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%rd1];", "`cp.async.mbarrier.arrive.noinc.shared.b64`"),
        // Copies: to other blocks, of other shapes, other sums.
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];",
            "1 coordinates, expected 2",
        ),
        (
            "cp.async.bulk.tensor.6d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];",
            "`6d`: 1d to 5d",
        ),
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r2, %r2}], [%r4];",
            "only `.tile` copies",
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd1, {%r2, %r3}], [%r4];",
            "multicast::cluster`",
        ),
        (
            "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1 + 64, {%r2}], [%r4];",
            "anything more is not supported",
        ),
        (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, [%r3];",
            "`cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes`",
        ),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 16;",
            "`cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32`",
        ),
        (
            "cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.bulk_group [%rd1, {%r1}], [%r1];",
            "`cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.bulk_group`",
        ),
        ("prefetch.param.tensormap [%rd1];", "a generic address"),
        ("cp.async.bulk.wait_group.read.write 0;", "unknown modifier"),
        ("createpolicy.range.global.L2::evict_last.b64 %rd1, [%rd2], 1, 1;", "`createpolicy.range"),
        // Fences of other proxies, and what clusters have.
        ("fence.proxy.alias;", "`fence.proxy.alias`"),
        ("fence.proxy.tensormap::generic.release.gpu;", "`fence.proxy.tensormap::generic.release.gpu`"),
        ("fence.mbarrier_init.release.gpu;", "`fence.mbarrier_init.release.gpu`"),
        ("setmaxnreg.inc.sync.aligned.u32 65;", "65 registers: a multiple of 8 from 24 to 256"),
        ("tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;", "`tensormap.replace"),
        ("griddepcontrol.wait.all;", "`griddepcontrol.wait.all`"),
        ("barrier.cluster.arrive.acquire;", "`barrier.cluster.arrive.acquire`"),
        ("barrier.cluster.wait.relaxed;", "`barrier.cluster.wait.relaxed`"),
        ("mapa.u64 %rd1, %rd2, %r3;", "only `.shared::cluster` addresses"),
        ("ld.shared::cluster.u32 %r1, [%r2];", "`ld.shared::cluster.u32`"),
        ("st.shared::cluster.u32 [%r2], %r1;", "`st.shared::cluster.u32`"),
        ("atom.shared::cluster.add.u32 %r1, [%r2], 1;", "`atom.shared::cluster.add.u32`"),
        ("mbarrier.init.shared::cluster.b64 [%r1], 1;", "arrivals without a state"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b8 [%r1], %r2, [%r3];", "4 or 8 bytes"),
        ("mov.u32 %r1, %cluster_ctaid.w;", "`%cluster_ctaid.w` is not known"),
        ("tcgen05.wait::ld.sync.aligned;", "`tcgen05.wait::ld.sync.aligned`"),
    ] {
        refused(line, what);
    }
}

#[test]
fn functions_and_calls() {
    let ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.func (.param .b32 r) f(.param .b32 x)\n{\nret;\n}\n";
    let Err(e) = Module::parse(ptx) else { panic!("a function was accepted") };
    assert!(e.line == 4 && e.to_string().contains("`.func` is not supported: compile with everything inlined"), "{e}");
    let ptx = ptx.replace(".func", ".visible .func");
    assert!(Module::parse(&ptx).is_err_and(|e| e.to_string().contains("`.func`")));
    let ptx = ptx.replace(".visible .func", ".extern .func");
    assert!(Module::parse(&ptx).is_err_and(|e| e.to_string().contains("`.extern .func`")));
    refused("call f;", "`call` is not supported: compile with everything inlined");
    refused("call.uni (%r1), f, (%r2, %r3);", "`call.uni` is not supported");
    refused("@%p1 call f, (%r2);", "`call` is not supported");
}

#[test]
fn modifiers_and_operands() {
    for (line, what) in [
        ("add.s33 %r1, %r1, %r1;", "`add.s33` in kernel `k`"),
        ("add.u32.sat %r1, %r1, %r1;", "`add.u32.sat`"),
        ("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1];", "`tex.2d.v4.f32.f32`"),
        ("ld.global.b128 %r1, [%rd1];", "`ld.global.b128`"),
        ("ld.global.v8.b32 {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1}, [%rd1];", "32 bytes at once"),
        ("ld.global.v4.b64 {%rd1, %rd1, %rd1, %rd1}, [%rd1];", "32 bytes at once"),
        ("ld.global.v2.b32 {%r1, %r1, %r1, %r1}, [%rd1];", "4 data operands, expected 2"),
        ("ld.release.gpu.global.u32 %r1, [%rd1];", "this order does not fit"),
        ("st.acquire.gpu.global.u32 [%rd1], %r1;", "this order does not fit"),
        ("ld.global.u32 %rq, [%rd1];", "is not a result"),
        ("atom.global.cas.b16 %r1, [%rd1], 1, 2;", "less than four bytes"),
        ("atom.global.add.f16 %r1, [%rd1], %r1;", "`atom.global.add.f16`"),
        ("atom.global.add.u32 %r1, [%rd1];", "2 operands, expected 3"),
        ("setp.lt.ftz.f64 %p1, %rd1, %rd2;", "`setp.lt.ftz.f64`"),
        ("setp.like.s32 %p1, %r1, %r2;", "`setp.like.s32`"),
        ("cvt.rna.tf32.f32 %r1, %f1;", "`cvt.rna.tf32.f32`"),
        ("cvt.rn.bf16.u8 %r1, %r2;", "`cvt.rn.bf16.u8`"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%f1}, {%f1}, {%f1};",
            "`mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32`",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%f1}, {%f1}, {%f1};",
            "1 registers where 4 are needed",
        ),
        (
            "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r1}, [%r2];",
            "`ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32`",
        ),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "`.cg` copies 16 bytes"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 12;", "4, 8 or 16 bytes"),
        ("shfl.up.b32 %r1, %r1, 1, 0;", "`shfl.up.b32`"),
        ("bar.sync;", "`bar.sync`"),
        ("add.u32 %r1, %rd1, 1;", "another width"),
        ("add.u32 %r1, %r1;", "2 operands, expected 3"),
        ("bra NOWHERE;", "no label `NOWHERE`"),
        ("brx.idx %r1, TABLE;", "no table `TABLE`"),
        ("T: .branchtargets A, B; brx.idx %r1, T;", "no label `A`"),
        ("mov.u32 %r1, %envreg0;", "`%envreg0` is not known"),
    ] {
        refused(line, what);
    }
}
