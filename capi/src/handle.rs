// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opaque handles.
//!
//! A handle is a pointer to a [`Handle`], whose first word contains its type and whether it is live. A thread that
//! destroys a handle first changes that word, so two threads that destroy one handle do not both free it.
//!
//! The first word of freed memory is not reliable. So debug builds keep a table of live handles, and check it before
//! they read the memory. They also keep the memory of a destroyed handle until [`QUARANTINE`](debug::QUARANTINE) others
//! were destroyed, so that its address does not come back as a new handle. This table is process-wide, and release
//! builds do not have it; the only other process-wide table is that of the devices in use (`kernel::cuda::shared`).

use std::{
    mem::ManuallyDrop,
    sync::{
        Mutex, MutexGuard, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::status::{CPATTN_BUSY, CPATTN_INVALID_HANDLE, Fail, Outcome};

/// The content of a kind of handle.
pub(super) trait HandleKind: Send + Sync + 'static {
    /// The name in the header.
    const NAME: &'static str;
    /// First word of a live handle of this kind.
    const MAGIC: u64;
}

const DEAD: u64 = u64::from_le_bytes(*b"cpatDEAD");

/// A handle of the C interface: the word that tells whether it is live, and its content.
#[derive(Debug)]
#[repr(C)]
pub struct Handle<T> {
    magic: AtomicU64,
    state: ManuallyDrop<T>,
}

fn refuse<T: HandleKind>(found: impl core::fmt::Display) -> Fail {
    Fail::new(CPATTN_INVALID_HANDLE, format!("{} is {found}, expected a live handle", T::NAME))
}

/// A new handle; owned by the caller that gets it, until [`take`] or [`destroy`].
pub(super) fn create<T: HandleKind>(state: T) -> *mut Handle<T> {
    let handle = Box::into_raw(Box::new(Handle { magic: AtomicU64::new(T::MAGIC), state: ManuallyDrop::new(state) }));
    #[cfg(debug_assertions)]
    debug::register(handle.addr());
    handle
}

/// Refuses pointers that are certainly not live handles of this kind.
///
/// # Safety
/// `ptr` is null, or came from [`create`] of some kind; in release builds, it was not destroyed either.
unsafe fn check<T: HandleKind>(ptr: *const Handle<T>) -> Outcome {
    if ptr.is_null() {
        return Err(refuse::<T>("NULL"));
    }
    if !ptr.is_aligned() {
        return Err(refuse::<T>("a misaligned address"));
    }
    #[cfg(debug_assertions)]
    if !debug::is_live(ptr.addr()) {
        return Err(refuse::<T>("no handle, or was destroyed"));
    }
    // SAFETY: the address is aligned and holds a Handle of some kind, and the first word of any kind is its magic.
    match unsafe { (*ptr).magic.load(Ordering::Acquire) } {
        magic if magic == T::MAGIC => Ok(()),
        DEAD => Err(refuse::<T>("destroyed")),
        _ => Err(refuse::<T>("destroyed, or a handle of another kind")),
    }
}

/// The content of a handle.
///
/// # Safety
/// As [`check`], and no thread destroys the handle while the reference is used.
pub(super) unsafe fn borrow<'a, T: HandleKind>(ptr: *const Handle<T>) -> Outcome<&'a T> {
    // SAFETY: null, or of `create` and not freed (promised).
    unsafe { check(ptr) }?;
    // SAFETY: checked to be a live handle of this kind; the caller keeps it alive.
    Ok(unsafe { &(*ptr).state })
}

/// Ends a handle and returns its content.
///
/// # Safety
/// As [`check`], and nothing else uses the handle.
pub(super) unsafe fn take<T: HandleKind>(ptr: *mut Handle<T>) -> Outcome<T> {
    // SAFETY: null, or of `create` and not freed (promised).
    unsafe { check(ptr) }?;
    // SAFETY: a live handle of this kind, as checked.
    let magic = unsafe { &(*ptr).magic };
    if magic.compare_exchange(T::MAGIC, DEAD, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Err(refuse::<T>("destroyed"));
    }
    // SAFETY: the exchange above succeeds once in the life of a handle, so the state is moved out once.
    let state = unsafe { core::ptr::read((&raw const (*ptr).state).cast::<T>()) };
    #[cfg(debug_assertions)]
    debug::retire(ptr.cast(), std::alloc::Layout::new::<Handle<T>>());
    #[cfg(not(debug_assertions))]
    // SAFETY: made by `create`; the state was moved out, and ManuallyDrop does not drop it again.
    drop(unsafe { Box::from_raw(ptr) });
    Ok(state)
}

/// Ends a handle and drops its content; does nothing for null.
///
/// # Safety
/// As [`take`].
pub(super) unsafe fn destroy<T: HandleKind>(ptr: *mut Handle<T>) -> Outcome {
    if ptr.is_null() {
        return Ok(());
    }
    // SAFETY: null, or of `create` and not freed (promised).
    unsafe { take(ptr) }.map(drop)
}

/// A kind whose calls exclude each other. The mutex is only ever tried: a second call is refused instead of queued.
pub(super) trait Exclusive: HandleKind {
    type State;

    fn mutex(&self) -> &Mutex<Self::State>;

    fn claim(&self) -> Outcome<MutexGuard<'_, Self::State>> {
        match self.mutex().try_lock() {
            Ok(state) => Ok(state),
            // A rank that panicked has aborted its transport, and its next call reports that; a scratch keeps no
            // results.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let text = format!("{} is inside a call of another thread, expected one call at a time", Self::NAME);
                Err(Fail::new(CPATTN_BUSY, text))
            }
        }
    }
}

/// As [`destroy`]; refused while a call of another thread uses the handle.
///
/// # Safety
/// As [`take`], except that a call of another thread may be in progress. None may begin now, as [`take`] says.
pub(super) unsafe fn destroy_idle<T: Exclusive>(ptr: *mut Handle<T>) -> Outcome {
    if !ptr.is_null() {
        // SAFETY: of `create` and not freed (promised).
        drop(unsafe { borrow(ptr) }?.claim()?);
    }
    // SAFETY: as above; no call was in progress, and none begins (promised).
    unsafe { destroy(ptr) }
}

#[cfg(debug_assertions)]
mod debug {
    use std::{
        alloc::{Layout, dealloc},
        collections::{BTreeSet, VecDeque},
        sync::{Mutex, MutexGuard, PoisonError},
    };

    /// How many destroyed handles keep their memory.
    pub const QUARANTINE: usize = 1024;

    struct HandleTable {
        live: BTreeSet<usize>,
        dead: VecDeque<(usize, Layout)>,
    }

    static TABLE: Mutex<HandleTable> = Mutex::new(HandleTable { live: BTreeSet::new(), dead: VecDeque::new() });

    fn table() -> MutexGuard<'static, HandleTable> {
        TABLE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn register(address: usize) {
        table().live.insert(address);
    }

    pub fn is_live(address: usize) -> bool {
        table().live.contains(&address)
    }

    /// Takes over the memory of a handle whose state was moved out.
    pub fn retire(ptr: *mut u8, layout: Layout) {
        let mut table = table();
        table.live.remove(&ptr.addr());
        table.dead.push_back((ptr.expose_provenance(), layout));
        if table.dead.len() > QUARANTINE
            && let Some((address, layout)) = table.dead.pop_front()
        {
            // SAFETY: a Box of this layout, which nothing refers to any more.
            unsafe { dealloc(core::ptr::with_exposed_provenance_mut(address), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct A {
        _counted: std::sync::Arc<()>,
    }
    struct B;
    impl HandleKind for A {
        const NAME: &'static str = "a";
        const MAGIC: u64 = 1;
    }
    impl HandleKind for B {
        const NAME: &'static str = "b";
        const MAGIC: u64 = 2;
    }

    fn text<T>(outcome: Outcome<T>) -> String {
        match outcome {
            Err(Fail { status: CPATTN_INVALID_HANDLE, text, .. }) => text,
            _ => panic!("expected a refused handle"),
        }
    }

    #[test]
    fn dead_and_foreign_handles_are_refused() {
        let counted = std::sync::Arc::new(());
        let (a, b) = (create(A { _counted: counted.clone() }), create(B));
        // SAFETY: handles of `create`; a debug build, whose destroyed handles may be asked for.
        unsafe {
            assert!(borrow(a).is_ok());
            assert!(text(borrow::<A>(b.cast())).contains("another kind"));
            assert!(text(borrow::<A>(core::ptr::null())).contains("NULL"));
            assert!(text(borrow(a.wrapping_byte_add(1))).contains("misaligned"));
            assert!(destroy(a).is_ok());
            assert_eq!(std::sync::Arc::strong_count(&counted), 1);
            assert!(text(destroy(a)).contains("destroyed"));
            assert!(text(borrow(a)).contains("destroyed"));
            assert!(destroy::<A>(core::ptr::null_mut()).is_ok());
            assert!(destroy(b).is_ok());
        }
    }
}
