// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs that were captured: what is in them, how they are instantiated and launched. None can be made by hand.

use super::codes;
use super::entry::{in_context, put, stream_of};
use super::graph::Graph;
use super::machine::Machine;
use super::queue::Work;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

fn instantiate(m: &mut Machine, out: *mut *mut c_void, graph: *mut c_void, flags: c_ulonglong) -> Result<(), i32> {
    // 1: frees what the graph allocated, which is nothing here; 8: priorities of nodes, which order nothing.
    if flags & !(1 | 8) != 0 {
        return Err(codes::NOT_SUPPORTED);
    }
    let exec = m.instantiate(graph as u64)?;
    // SAFETY: the caller's result pointer.
    unsafe { put(out, exec as *mut c_void) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut *mut c_void,
    graph: *mut c_void,
    flags: c_ulonglong,
) -> i32 {
    in_context("cuGraphInstantiate", |m, _| instantiate(m, out, graph, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiate_v2(
    out: *mut *mut c_void,
    graph: *mut c_void,
    _node: *mut *mut c_void,
    _log: *mut c_char,
    _len: usize,
) -> i32 {
    in_context("cuGraphInstantiate", |m, _| instantiate(m, out, graph, 0))
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS` of `cuda.h`.
#[repr(C)]
pub struct InstantiateParams {
    flags: c_ulonglong,
    upload_stream: *mut c_void,
    error_node: *mut c_void,
    result: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithParams(
    out: *mut *mut c_void,
    graph: *mut c_void,
    params: *mut InstantiateParams,
) -> i32 {
    in_context("cuGraphInstantiate", |m, _| {
        if params.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the caller's parameters, two of which are results.
        unsafe {
            instantiate(m, out, graph, (*params).flags & !2)?;
            (*params).error_node = std::ptr::null_mut();
            (*params).result = 0;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> i32 {
    in_context("cuGraphLaunch", |m, d| {
        let s = stream_of(m, d, stream)?;
        m.launch_graph(exec as u64, s)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphUpload(exec: *mut c_void, stream: *mut c_void) -> i32 {
    in_context("cuGraphUpload", |m, d| {
        stream_of(m, d, stream)?;
        if m.execs.contains_key(&(exec as u64)) { Ok(()) } else { Err(codes::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(exec: *mut c_void) -> i32 {
    in_context("cuGraphExecDestroy", |m, _| m.destroy_exec(exec as u64))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> i32 {
    in_context("cuGraphDestroy", |m, _| {
        if m.captures.values().any(|c| c.graph == graph as u64) {
            return Err(codes::INVALID_VALUE);
        }
        m.graphs.remove(&(graph as u64)).map(|_| ()).ok_or(codes::INVALID_VALUE)
    })
}

/// The handle of a node: its graph's and its number.
fn node_handle(graph: u64, n: usize) -> u64 {
    graph << 24 | (n as u64 + 1)
}

fn node_of(m: &Machine, node: *mut c_void) -> Result<&Work, i32> {
    let (graph, n) = (node as u64 >> 24, (node as u64 & 0xff_ffff) as usize);
    let found = m.graphs.get(&graph).and_then(|g| g.nodes.get(n.checked_sub(1)?));
    found.map(|n| &n.work).ok_or(codes::INVALID_VALUE)
}

fn graph_of(m: &Machine, graph: *mut c_void) -> Result<&Graph, i32> {
    m.graphs.get(&(graph as u64)).ok_or(codes::INVALID_VALUE)
}

/// Gives as many of `all` as the caller has room for, and how many there are; without room only the latter.
unsafe fn list<const N: usize>(outs: [*mut *mut c_void; N], count: *mut usize, all: &[[u64; N]]) -> Result<(), i32> {
    if count.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: not null; the caller says there how many each of his lists holds.
    unsafe {
        if !outs[0].is_null() {
            for (i, row) in all.iter().take(count.read()).enumerate() {
                for (out, &value) in outs.iter().zip(row) {
                    out.add(i).write(value as *mut c_void);
                }
            }
        }
        put(count, all.len())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(graph: *mut c_void, nodes: *mut *mut c_void, count: *mut usize) -> i32 {
    in_context("cuGraphGetNodes", |m, _| {
        let all: Vec<_> = (0..graph_of(m, graph)?.nodes.len()).map(|n| [node_handle(graph as u64, n)]).collect();
        // SAFETY: passed on.
        unsafe { list([nodes], count, &all) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetEdges(
    graph: *mut c_void,
    from: *mut *mut c_void,
    to: *mut *mut c_void,
    count: *mut usize,
) -> i32 {
    in_context("cuGraphGetEdges", |m, _| {
        let handle = |n| node_handle(graph as u64, n);
        let nodes = graph_of(m, graph)?.nodes.iter().enumerate();
        let all: Vec<_> = nodes.flat_map(|(n, node)| node.after.iter().map(move |&a| [handle(a), handle(n)])).collect();
        // SAFETY: passed on.
        unsafe { list([from, to], count, &all) }
    })
}

/// As [`cuGraphGetEdges`]. No edge carries data here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetEdges_v2(
    graph: *mut c_void,
    from: *mut *mut c_void,
    to: *mut *mut c_void,
    data: *mut c_ulonglong,
    count: *mut usize,
) -> i32 {
    if !data.is_null() {
        return codes::NOT_SUPPORTED;
    }
    // SAFETY: passed on.
    unsafe { cuGraphGetEdges(graph, from, to, count) }
}

/// Kernel 0, copy 1, fill 2, function of the host 3, wait for an event 6, record 7; another library's work is a kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphNodeGetType(node: *mut c_void, out: *mut c_int) -> i32 {
    in_context("cuGraphNodeGetType", |m, _| {
        let kind = match node_of(m, node)? {
            Work::Copy { .. } => 1,
            Work::Fill { .. } => 2,
            Work::Host { .. } => 3,
            Work::Await { .. } => 6,
            Work::Record { .. } => 7,
            _ => 0,
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(out, kind) }
    })
}
