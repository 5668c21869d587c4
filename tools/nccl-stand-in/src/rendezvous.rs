// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranks of a communicator find each other: a folder whose path is the unique id.
//!
//! Every rank listens on a socket in the folder, connects to the ranks below its own and accepts those above. Each end
//! tells who it is, how many ranks it expects and which device it has. The folder goes away with the last socket.

use crate::codes::{Failure, INVALID_ARGUMENT, INVALID_USAGE, Outcome, REMOTE_ERROR, SYSTEM_ERROR};
use crate::config::Config;
use crate::link::Link;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// `ncclUniqueId` of `nccl.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    bytes: [u8; 128],
}

const MAGIC: &[u8] = b"nccl-stand-in:";

impl UniqueId {
    /// A new one, with its folder.
    pub(crate) fn new() -> Outcome<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let name = format!("nccl-{}-{}-{now:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        let failed = |why: String| Failure::new(SYSTEM_ERROR, format!("{}: {why}", folder.display()));
        std::fs::create_dir(&folder).map_err(|e| failed(e.to_string()))?;
        let path = folder.as_os_str().as_encoded_bytes();
        let mut bytes = [0; 128];
        // Names of sockets have room for 107 bytes, and a rank comes behind.
        if MAGIC.len() + path.len() > 100 {
            return Err(failed("the path is too long for a unique id: set TMPDIR".to_owned()));
        }
        bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        bytes[MAGIC.len()..][..path.len()].copy_from_slice(path);
        Ok(Self { bytes })
    }

    fn folder(&self) -> Option<PathBuf> {
        let path = self.bytes.strip_prefix(MAGIC)?;
        let end = path.iter().position(|&b| b == 0)?;
        Some(PathBuf::from(std::str::from_utf8(&path[..end]).ok()?))
    }
}

/// Who an end is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) world: usize,
    pub(crate) rank: usize,
    /// Host and bus of the device: no two ranks have the same.
    pub(crate) device: String,
}

impl Who {
    fn tell(&self, socket: &mut UnixStream) -> std::io::Result<()> {
        let text = format!("{} {} {}", self.world, self.rank, self.device);
        socket.write_all(&(text.len() as u32).to_le_bytes())?;
        socket.write_all(text.as_bytes())
    }

    fn hear(socket: &mut UnixStream) -> std::io::Result<Self> {
        let mut len = [0; 4];
        socket.read_exact(&mut len)?;
        let mut text = vec![0; u32::from_le_bytes(len).min(4096) as usize];
        socket.read_exact(&mut text)?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let mut words = text.splitn(3, ' ');
        let mut number =
            || words.next().and_then(|w| w.parse().ok()).ok_or(std::io::Error::from(ErrorKind::InvalidData));
        let (world, rank) = (number()?, number()?);
        Ok(Self { world, rank, device: words.next().unwrap_or_default().to_owned() })
    }
}

/// Removes a rank's socket, and the folder when it was the last.
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        // The last process removes the folder; a failure leaves an empty folder of the system's temporary ones.
        let _ = std::fs::remove_file(&self.0);
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// The links to all other ranks, by rank.
pub(crate) fn connect(id: &UniqueId, me: &Who, config: &Config, ended: &AtomicBool) -> Outcome<Vec<Option<Link>>> {
    let begin = Instant::now();
    let invalid = || Failure::new(INVALID_ARGUMENT, "the unique id is none that this library's ncclGetUniqueId made");
    let folder = id.folder().ok_or_else(invalid)?;
    let on = || -> Outcome {
        if ended.load(Ordering::Relaxed) {
            return Err(Failure::new(INVALID_USAGE, "the communicator was aborted while it was being made"));
        }
        if begin.elapsed() > config.init {
            let why = format!("rank {} of {} waited {} s for the others", me.rank, me.world, config.init.as_secs());
            return Err(Failure::new(REMOTE_ERROR, why));
        }
        sleep(Duration::from_micros(500));
        Ok(())
    };
    if config.absent(me.rank) {
        loop {
            on()?;
        }
    }
    let system = |e: std::io::Error| Failure::new(SYSTEM_ERROR, format!("{}: {e}", folder.display()));
    let path = |rank: usize| folder.join(rank.to_string());
    let listener = UnixListener::bind(path(me.rank)).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => Failure::new(INVALID_USAGE, format!("there are two ranks {}", me.rank)),
        ErrorKind::NotFound => Failure::new(INVALID_ARGUMENT, "the unique id was used before"),
        _ => system(e),
    })?;
    let _socket = Socket(path(me.rank));
    listener.set_nonblocking(true).map_err(system)?;
    let mut links: Vec<Option<Link>> = (0..me.world).map(|_| None).collect();
    let mut others = Vec::new();
    for rank in 0..me.rank {
        let socket = reach(&path(rank), &on)?;
        let who = greet(socket, me, config, &mut links, true)?;
        others.push(who);
    }
    while others.len() + 1 < me.world {
        match listener.accept() {
            Ok((socket, _)) => others.push(greet(socket, me, config, &mut links, false)?),
            Err(e) if e.kind() == ErrorKind::WouldBlock => on()?,
            Err(e) => return Err(system(e)),
        }
    }
    if let Some(same) = others.iter().find(|o| o.device == me.device) {
        let why = format!("duplicate GPU: rank {} and rank {} have device {}", me.rank, same.rank, me.device);
        return Err(Failure::new(INVALID_USAGE, why));
    }
    Ok(links)
}

/// Connects to a rank, once it listens.
fn reach(path: &Path, on: &impl Fn() -> Outcome) -> Outcome<UnixStream> {
    loop {
        match UnixStream::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => on()?,
            Err(e) if e.kind() == ErrorKind::WouldBlock => on()?,
            Err(e) => return Err(Failure::new(SYSTEM_ERROR, format!("{}: {e}", path.display()))),
        }
    }
}

/// Both ends tell who they are.
fn greet(mut socket: UnixStream, me: &Who, config: &Config, links: &mut [Option<Link>], lower: bool) -> Outcome<Who> {
    let gone = |e: std::io::Error| Failure::new(REMOTE_ERROR, format!("a rank left while the others met: {e}"));
    socket.set_nonblocking(false).and_then(|()| socket.set_read_timeout(Some(config.init))).map_err(gone)?;
    me.tell(&mut socket).map_err(gone)?;
    let who = Who::hear(&mut socket).map_err(gone)?;
    if who.world != me.world {
        let why = format!("rank {} expects {} ranks, rank {} expects {}", me.rank, me.world, who.rank, who.world);
        return Err(Failure::new(INVALID_ARGUMENT, why));
    }
    match links.get_mut(who.rank) {
        Some(slot @ None) if who.rank != me.rank && (who.rank < me.rank) == lower => {
            *slot = Some(Link::new(socket).map_err(gone)?);
            Ok(who)
        }
        _ => Err(Failure::new(INVALID_USAGE, format!("there are two ranks {}", who.rank))),
    }
}
