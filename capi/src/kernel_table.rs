// SPDX-License-Identifier: MIT OR Apache-2.0
//! A table of the caller's functions as a kernel for attention, given with the options of a rank.

use core::ffi::{CStr, c_char, c_void};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{
    input::{reserved, sized},
    status::Outcome,
};
use cpattn::{
    Dtype, Error, Result,
    kernel::varlen::{Elements, ElementsMut, Honours, Rectangles, VarlenKernel},
};

pub const CPATTN_KERNEL_TEXT: usize = 512;
pub const CPATTN_KERNEL_WINDOWS: u32 = 1;
pub const CPATTN_KERNEL_SOFTCAP: u32 = 2;
pub const CPATTN_KERNEL_SLOPES: u32 = 4;
pub const CPATTN_KERNEL_GROUPS: u32 = 8;
pub const CPATTN_KERNEL_VALUE_DIM: u32 = 16;
pub const CPATTN_KERNEL_ROUNDED_O: u32 = 32;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_kernel_call {
    pub struct_size: usize,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    pub sequences: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub value_dim: u32,
    pub dtype: i32,
    pub window_left: i64,
    pub window_right: i64,
    pub scale: f64,
    pub softcap: f64,
    pub alibi_slopes: *const f32,
    pub corners: *const i64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *mut c_void,
    pub lse: *mut c_void,
    pub d_o: *const c_void,
    pub delta: *const c_void,
    pub dq: *mut c_void,
    pub dk: *mut c_void,
    pub dv: *mut c_void,
}

type KernelFunction =
    Option<unsafe extern "C" fn(context: *mut c_void, call: *const cpattn_kernel_call, text: *mut c_char) -> i32>;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_kernel_table {
    pub struct_size: usize,
    pub context: *mut c_void,
    pub name: *const c_char,
    pub dtypes: u32,
    pub head_dim: u32,
    pub honours: u32,
    pub reserved: i32,
    pub forward:
        Option<unsafe extern "C" fn(context: *mut c_void, call: *const cpattn_kernel_call, text: *mut c_char) -> i32>,
    pub backward:
        Option<unsafe extern "C" fn(context: *mut c_void, call: *const cpattn_kernel_call, text: *mut c_char) -> i32>,
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

versioned! { cpattn_kernel_table through release; }

/// The caller's functions as a kernel.
#[derive(Debug)]
pub(super) struct TableKernel {
    table: cpattn_kernel_table,
    name: String,
    dtypes: Vec<Dtype>,
    /// Set when the rank owns the table; before, it stays the caller's.
    owned: Arc<AtomicBool>,
}

// SAFETY: the header says that the functions are called on the threads that run plans, one at a time.
unsafe impl Send for TableKernel {}

const TYPES: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

impl TableKernel {
    /// Of a table that is not NULL. The flag makes the table the rank's.
    ///
    /// # Safety
    /// The header's promise about structs, and about the name.
    pub(super) unsafe fn new(table: *const cpattn_kernel_table) -> Outcome<(Self, Arc<AtomicBool>)> {
        let table = given!(sized("options.kernel", table));
        if table.name.is_null() {
            return Err(Error::invalid("options.kernel.name", "NULL", "a name").into());
        }
        if table.forward.is_none() {
            return Err(Error::invalid("options.kernel.forward", "NULL", "a function").into());
        }
        if table.dtypes == 0 || table.dtypes >= 1 << TYPES.len() {
            let expected = "a set of 1 << CPATTN_F16, 1 << CPATTN_BF16, 1 << CPATTN_F32 and 1 << CPATTN_F64";
            return Err(Error::invalid("options.kernel.dtypes", table.dtypes, expected).into());
        }
        if table.head_dim == 0 {
            return Err(Error::invalid("options.kernel.head_dim", 0, "at least 1: the largest that it takes").into());
        }
        if table.honours >= 2 * CPATTN_KERNEL_ROUNDED_O {
            return Err(Error::invalid("options.kernel.honours", table.honours, "a set of CPATTN_KERNEL_...").into());
        }
        reserved("options.kernel.reserved", table.reserved == 0)?;
        // SAFETY: a C string, by the header.
        let name = unsafe { CStr::from_ptr(table.name) }.to_string_lossy().into_owned();
        let dtypes = TYPES.into_iter().filter(|&dtype| table.dtypes & 1 << dtype as u32 != 0).collect();
        let owned = Arc::new(AtomicBool::new(false));
        Ok((Self { table, name, dtypes, owned: Arc::clone(&owned) }, owned))
    }

    fn outcome(function: &str, code: i32, text: &mut [c_char; CPATTN_KERNEL_TEXT]) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        text[CPATTN_KERNEL_TEXT - 1] = 0;
        // SAFETY: it ends with a zero, as written above.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        let message = if text.is_empty() { "it gave no reason".into() } else { text.into_owned() };
        Err(Error::Device {
            call: if function == "forward" { "forward" } else { "backward" },
            code: code.into(),
            message,
        })
    }

    /// Calls a function, which is there.
    fn call(&self, name: &str, function: KernelFunction, call: &cpattn_kernel_call) -> Result<()> {
        let mut text = [0; CPATTN_KERNEL_TEXT];
        let function = function.expect(super::table::CHECKED);
        // SAFETY: the table's own function, as the header describes it; the tensors are valid during the call.
        let code = unsafe { function(self.table.context, call, text.as_mut_ptr()) };
        Self::outcome(name, code, &mut text)
    }
}

fn address(x: &Elements<'_>) -> *const c_void {
    match x {
        Elements::F16(x) => x.as_ptr().cast(),
        Elements::Bf16(x) => x.as_ptr().cast(),
        Elements::F32(x) => x.as_ptr().cast(),
        Elements::F64(x) => x.as_ptr().cast(),
    }
}

fn address_mut(x: &mut ElementsMut<'_>) -> *mut c_void {
    match x {
        ElementsMut::F16(x) => x.as_mut_ptr().cast(),
        ElementsMut::Bf16(x) => x.as_mut_ptr().cast(),
        ElementsMut::F32(x) => x.as_mut_ptr().cast(),
        ElementsMut::F64(x) => x.as_mut_ptr().cast(),
    }
}

/// What both directions have.
fn common(call: &Rectangles<'_>, inputs: &[Elements<'_>]) -> cpattn_kernel_call {
    let limit = |x: Option<u32>| x.map_or(-1, i64::from);
    let (slopes, null) = (!call.alibi_slopes.is_empty(), core::ptr::null_mut());
    cpattn_kernel_call {
        struct_size: size_of::<cpattn_kernel_call>(),
        cu_seqlens_q: call.cu_seqlens_q.as_ptr(),
        cu_seqlens_k: call.cu_seqlens_k.as_ptr(),
        sequences: call.len() as u32,
        heads: call.heads as u32,
        kv_heads: call.kv_heads as u32,
        head_dim: call.head_dim as u32,
        value_dim: call.value_dim as u32,
        dtype: call.dtype as i32,
        window_left: limit(call.window_left),
        window_right: limit(call.window_right),
        scale: call.scale,
        softcap: call.softcap,
        alibi_slopes: if slopes { call.alibi_slopes.as_ptr() } else { core::ptr::null() },
        corners: if slopes { call.corners.as_ptr() } else { core::ptr::null() },
        q: address(&inputs[0]),
        k: address(&inputs[1]),
        v: address(&inputs[2]),
        o: null,
        lse: null,
        d_o: null,
        delta: null,
        dq: null,
        dk: null,
        dv: null,
    }
}

impl VarlenKernel for TableKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn honours(&self) -> Honours {
        let has = |flag| self.table.honours & flag != 0;
        let mut honours = Honours::new(&self.dtypes, self.table.head_dim);
        honours.windows = has(CPATTN_KERNEL_WINDOWS);
        honours.softcap = has(CPATTN_KERNEL_SOFTCAP);
        honours.alibi_slopes = has(CPATTN_KERNEL_SLOPES);
        honours.groups = has(CPATTN_KERNEL_GROUPS);
        honours.value_dim = has(CPATTN_KERNEL_VALUE_DIM);
        honours.rounded_o = has(CPATTN_KERNEL_ROUNDED_O);
        honours.backward = self.table.backward.is_some();
        honours
    }

    fn forward(
        &mut self, call: &Rectangles<'_>, inputs: [Elements<'_>; 3], mut o: ElementsMut<'_>, mut lse: ElementsMut<'_>,
    ) -> Result<()> {
        let call = cpattn_kernel_call { o: address_mut(&mut o), lse: address_mut(&mut lse), ..common(call, &inputs) };
        self.call("forward", self.table.forward, &call)
    }

    fn backward(
        &mut self, call: &Rectangles<'_>, inputs: [Elements<'_>; 4], lse: Elements<'_>, delta: Elements<'_>,
        gradients: [ElementsMut<'_>; 3],
    ) -> Result<()> {
        let [dq, dk, dv] = gradients.map(|mut x| address_mut(&mut x));
        let (d_o, delta, lse) = (address(&inputs[3]), address(&delta), address(&lse).cast_mut());
        let call = cpattn_kernel_call { d_o, delta, lse, dq, dk, dv, ..common(call, &inputs) };
        self.call("backward", self.table.backward, &call)
    }
}

impl Drop for TableKernel {
    fn drop(&mut self) {
        if let Some(release) = self.table.release.filter(|_| self.owned.load(Relaxed)) {
            // SAFETY: the table's own function; nothing calls the table afterwards.
            unsafe { release(self.table.context) };
        }
    }
}
