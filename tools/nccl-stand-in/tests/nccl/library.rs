// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL as a program finds it: `libnccl.so.2`, opened at run time; and a rank with a device, a stream and memory.

use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub type Id = [u8; 128];

/// Passed by value, as `nccl.h` has it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ById {
    pub bytes: Id,
}

#[repr(C)]
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub rest: [c_int; 16],
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

macro_rules! functions {
    ($($name:ident($($arg:ty),*) -> $ret:ty;)*) => {
        #[allow(non_snake_case, reason = "the names of nccl.h")]
        pub struct Nccl { $(pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        /// The library of this process.
        pub fn nccl() -> &'static Nccl {
            static LIBRARY: OnceLock<Nccl> = OnceLock::new();
            LIBRARY.get_or_init(|| {
                // SAFETY: names that end in a zero byte, and functions with the signatures of nccl.h.
                unsafe {
                    let library = dlopen(c"libnccl.so.2".as_ptr(), 2);
                    assert!(!library.is_null(), "no libnccl.so.2");
                    Nccl { $($name: {
                        let symbol = dlsym(library, concat!(stringify!($name), "\0").as_ptr().cast());
                        assert!(!symbol.is_null(), stringify!($name));
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(symbol)
                    },)* }
                }
            })
        }
    };
}

functions! {
    ncclGetVersion(*mut c_int) -> c_int;
    ncclGetUniqueId(*mut ById) -> c_int;
    ncclCommInitRank(*mut *mut c_void, c_int, ById, c_int) -> c_int;
    ncclCommInitRankConfig(*mut *mut c_void, c_int, ById, c_int, *const Config) -> c_int;
    ncclCommCount(*mut c_void, *mut c_int) -> c_int;
    ncclCommUserRank(*mut c_void, *mut c_int) -> c_int;
    ncclCommCuDevice(*mut c_void, *mut c_int) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
    ncclSend(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    ncclRecv(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    ncclAllGather(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
    ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    ncclCommGetAsyncError(*mut c_void, *mut c_int) -> c_int;
    ncclCommAbort(*mut c_void) -> c_int;
    ncclCommFinalize(*mut c_void) -> c_int;
    ncclCommDestroy(*mut c_void) -> c_int;
    ncclGetErrorString(c_int) -> *const c_char;
    ncclGetLastError(*mut c_void) -> *const c_char;
}

/// Calls a function of the library and gives its code.
macro_rules! call {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the cases hand out handles they made, memory of a size they know and pointers to locals.
        unsafe { (nccl().$f)($($arg),*) }
    }};
}
pub(crate) use call;

macro_rules! ok {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        let code = call!($f($($arg),*));
        assert_eq!(code, 0, "{}: {}", stringify!($f), $crate::library::last_error());
    }};
}
pub(crate) use ok;

pub fn last_error() -> String {
    // SAFETY: a text of the library's that ends in a zero byte.
    unsafe { CStr::from_ptr((nccl().ncclGetLastError)(std::ptr::null_mut())) }.to_string_lossy().into_owned()
}

pub const UINT8: c_int = 1;
pub const UINT64: c_int = 5;
pub const SUM: c_int = 0;
pub const IN_PROGRESS: c_int = 7;

/// A rank: its device's context is current on this thread.
pub struct Rank {
    pub rank: usize,
    pub world: usize,
    pub comm: *mut c_void,
    pub stream: sys::CUstream,
}

/// Makes a device's context current.
pub fn enter(device: usize) {
    let (mut context, mut handle) = (std::ptr::null_mut(), 0);
    // SAFETY: pointers to locals; the context is retained and stays.
    unsafe {
        sys::cuInit(0).result().unwrap();
        sys::cuDeviceGet(&raw mut handle, device as c_int).result().unwrap();
        sys::cuDevicePrimaryCtxRetain(&raw mut context, handle).result().unwrap();
        sys::cuCtxSetCurrent(context).result().unwrap();
    }
}

pub fn stream() -> sys::CUstream {
    result::stream::create(result::stream::StreamKind::NonBlocking).unwrap()
}

pub fn wait(stream: sys::CUstream) -> sys::CUresult {
    // SAFETY: a stream that was made here.
    unsafe { sys::cuStreamSynchronize(stream) }
}

/// Memory with these bytes, which are there for every stream.
pub fn upload(bytes: &[u8]) -> u64 {
    // SAFETY: an allocation of that size.
    unsafe {
        let p = result::malloc_sync(bytes.len()).unwrap();
        sys::cuMemcpyHtoD_v2(p, bytes.as_ptr().cast(), bytes.len()).result().unwrap();
        sys::cuStreamSynchronize(std::ptr::null_mut()).result().unwrap();
        p
    }
}

pub fn download(p: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: the allocation has at least that size.
    unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), p, bytes) }.result().unwrap();
    out
}

/// The id that rank 0 leaves in the folder.
pub fn id(rank: usize, folder: &str) -> ById {
    let (path, fresh) = (format!("{folder}/id"), format!("{folder}/.id"));
    let mut id = ById { bytes: [0; 128] };
    if rank == 0 {
        ok!(ncclGetUniqueId(&raw mut id));
        std::fs::write(&fresh, id.bytes).unwrap();
        std::fs::rename(&fresh, &path).unwrap();
        return id;
    }
    let begin = Instant::now();
    loop {
        if let Ok(bytes) = std::fs::read(&path) {
            id.bytes.copy_from_slice(&bytes);
            return id;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "no id from rank 0");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn config(blocking: bool) -> Config {
    let rest = [c_int::MIN; 16];
    Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 22809, blocking: blocking.into(), rest }
}

pub fn asked(comm: *mut c_void) -> c_int {
    let mut code = -1;
    ok!(ncclCommGetAsyncError(comm, &raw mut code));
    code
}

/// Asks until nothing is in progress.
pub fn settled(comm: *mut c_void) -> c_int {
    let begin = Instant::now();
    loop {
        match asked(comm) {
            IN_PROGRESS => std::thread::sleep(Duration::from_micros(100)),
            code => return code,
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "in progress for 30 s");
    }
}

impl Rank {
    pub fn new(rank: usize, world: usize, folder: &str, blocking: bool) -> Self {
        let mut comm = std::ptr::null_mut();
        if blocking {
            ok!(ncclCommInitRank(&raw mut comm, world as c_int, id(rank, folder), rank as c_int));
        } else {
            let config = config(false);
            let (ranks, me) = (world as c_int, rank as c_int);
            let code = call!(ncclCommInitRankConfig(&raw mut comm, ranks, id(rank, folder), me, &raw const config));
            assert_eq!(code, IN_PROGRESS);
            assert_eq!(settled(comm), 0);
        }
        Self { rank, world, comm, stream: stream() }
    }

    pub fn send(&self, p: u64, bytes: usize, peer: usize) {
        ok!(ncclSend(p as *const c_void, bytes, UINT8, peer as c_int, self.comm, self.stream.cast()));
    }

    pub fn recv(&self, p: u64, bytes: usize, peer: usize) {
        ok!(ncclRecv(p as *mut c_void, bytes, UINT8, peer as c_int, self.comm, self.stream.cast()));
    }

    pub fn start(&self) {
        ok!(ncclGroupStart());
    }

    /// Ends the group, and asks until it is in its stream.
    pub fn end(&self) {
        let code = call!(ncclGroupEnd());
        if code == IN_PROGRESS {
            assert_eq!(settled(self.comm), 0);
        } else {
            assert_eq!(code, 0, "{}", last_error());
        }
    }

    pub fn wait(&self) {
        wait(self.stream).result().unwrap();
    }

    pub fn destroy(self) {
        ok!(ncclCommDestroy(self.comm));
    }
}
