// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shifts rows when no rank has the whole batch, for example for next-token labels.
//!
//! [`LocalTokens::shift`](crate::plan::LocalTokens::shift) needs the whole batch. Here each rank has only its own
//! tokens' rows, and receives the others in one exchange, with at most one message from each rank to each other. The
//! plan determines which rows these are ([`Plan::shift_messages`]), so no requests are sent. Rows are in host memory:
//! token ids, loss weights, segment ids. With a device transport they are copied to device memory and back.

use std::{format, vec, vec::Vec};

use bytemuck::Pod;

use super::{collective, rank::Rank};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::{Plan, local_tokens::ShiftMessage},
    transport::{
        Label,
        carrier::{Carrier, WireBuffer},
    },
};

/// The number that ranks compare first: "shift", and the version of the protocol.
const SHIFT: [u64; 2] = [u64::from_le_bytes(*b"shift\0\0\0"), 1];

/// A rank's rows before and after a [`Rank::shift`], in any storage: strided, of a framework's tensors, on disk.
/// Before and after the shift they are as many as the rank has q tokens.
///
/// ```
/// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, runtime::ShiftedRows, transport::local};
///
/// /// Labels in every second byte.
/// struct Labels([u8; 8]);
/// impl ShiftedRows for Labels {
///     fn row_bytes(&self) -> usize {
///         1
///     }
///     fn kind(&self) -> u64 {
///         0
///     }
///     fn read(&self, row: usize, to: &mut [u8]) {
///         to[0] = self.0[2 * row];
///     }
///     fn write(&mut self, row: usize, from: &[u8]) {
///         self.0[2 * row + 1] = from[0];
///     }
///     fn fill(&mut self, row: usize) {
///         self.0[2 * row + 1] = u8::MAX;
///     }
/// }
///
/// let problem = Problem::new(Batch::from_lengths(&[3, 1])?, 1, 1, 4, Dtype::F32);
/// let plan = Plan::new(&problem, Mesh::single(), Layout::Contiguous)?;
/// let mut rank = Rank::new(local::group(1, std::time::Duration::from_secs(1))?.remove(0));
/// let labels = rank.shift(&plan, 1, Labels([1, 0, 2, 0, 3, 0, 4, 0]))?;
/// assert_eq!(labels.0, [1, 2, 2, 3, 3, u8::MAX, 4, u8::MAX]);
/// # Ok::<(), cpattn::Error>(())
/// ```
pub trait ShiftedRows {
    /// Bytes of a row.
    fn row_bytes(&self) -> usize;

    /// A number that identifies the element type and the shape of a row. All ranks must have the same number and the
    /// same row size.
    fn kind(&self) -> u64;

    /// Copies a row of the input.
    fn read(&self, row: usize, to: &mut [u8]);

    /// Writes a row of the result.
    fn write(&mut self, row: usize, from: &[u8]);

    /// Writes a row of the result for which the document has no source.
    fn fill(&mut self, row: usize);

    /// Refuses a number of tokens, those of `rank`, that is not the number of rows; called before anything else.
    ///
    /// # Errors
    /// The refusal, which [`Rank::shift`] returns. Without an implementation every number is accepted.
    fn check(&self, tokens: usize, rank: usize) -> Result<()> {
        let _ = (tokens, rank);
        Ok(())
    }
}

/// Rows of a slice, `[tokens, row_len]`, compact, and the shifted rows.
#[derive(Debug)]
pub struct SliceRows<'a, T> {
    rows: &'a [T],
    row_len: usize,
    /// Begins as rows of the fill value, which rows without a source keep.
    shifted: Vec<T>,
}

impl<'a, T: Pod> SliceRows<'a, T> {
    /// Rows of `row_len` elements, and the element for those that the shift does not fill.
    pub fn new(rows: &'a [T], row_len: usize, fill: T) -> Self {
        Self { rows, row_len, shifted: vec![fill; rows.len()] }
    }

    /// The shifted rows, of the shape of `rows`.
    pub fn into_shifted(self) -> Vec<T> {
        self.shifted
    }
}

impl<T: Pod> ShiftedRows for SliceRows<'_, T> {
    fn row_bytes(&self) -> usize {
        self.row_len * size_of::<T>()
    }

    fn kind(&self) -> u64 {
        size_of::<T>() as u64
    }

    fn read(&self, row: usize, to: &mut [u8]) {
        to.copy_from_slice(bytemuck::cast_slice(&self.rows[row * self.row_len..][..self.row_len]));
    }

    fn write(&mut self, row: usize, from: &[u8]) {
        bytemuck::cast_slice_mut(&mut self.shifted[row * self.row_len..][..self.row_len]).copy_from_slice(from);
    }

    fn fill(&mut self, _row: usize) {}

    fn check(&self, tokens: usize, rank: usize) -> Result<()> {
        if tokens.checked_mul(self.row_len) == Some(self.rows.len()) {
            return Ok(());
        }
        let expected = format!("{} for each of {tokens} tokens of rank {rank}", self.row_len);
        Err(Error::invalid("rows", format!("of length {}", self.rows.len()), expected))
    }
}

impl Rank {
    /// For each of this rank's q tokens, in its order, finds the row that is `by` tokens later in its document
    /// (earlier, if `by` is negative), which another rank may hold; a row of the fill value if the document has no such
    /// token. Rows are those of a slice ([`SliceRows`]) or in any other storage ([`ShiftedRows`]), which is returned
    /// with the result. Nothing is written before the ranks have agreed. All ranks of the plan's group call it, between
    /// runs. With `by` 1 and the loss function's ignore index as fill value the result is the labels of next-token
    /// prediction.
    ///
    /// Rows are in host memory, also for a rank on a device, which first waits for the work it enqueued. The time is
    /// proportional to the number of contiguous pieces of all ranks' tokens, which is a few for each document and rank
    /// with all layouts except striped.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Side, runtime::SliceRows, transport::local};
    /// use std::time::Duration;
    ///
    /// let problem = Problem::new(Batch::from_lengths(&[8])?, 2, 2, 4, Dtype::F32);
    /// let plan = &Plan::new(&problem, Mesh::ring(2)?, Layout::Zigzag)?;
    /// let ids = [10, 11, 12, 13, 14, 15, 16, 17];
    /// std::thread::scope(|scope| {
    ///     for end in local::group(2, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             let mut rank = Rank::new(end);
    ///             let mine = plan.local_tokens(Side::Q, rank.rank()).shard(&ids, 1).unwrap();
    ///             let labels = rank.shift(plan, 1, SliceRows::new(&mine, 1, -100)).unwrap().into_shifted();
    ///             assert_eq!(labels, plan.local_tokens(Side::Q, rank.rank()).shift(&ids, -100, 1).unwrap());
    ///         });
    ///     }
    /// });
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// A `rows` whose length is not `tokens · row_len`, a plan for another world; [`Error::Disagreement`] if another
    /// rank makes a different call or shifts differently, after which the group stays usable; a peer that failed; on a
    /// device, a run of this rank that is being captured.
    pub fn shift<R: ShiftedRows>(&mut self, plan: &Plan, by: i64, mut rows: R) -> Result<R> {
        plan.fits_world(self.world())?;
        let rank = self.rank();
        rows.check(plan.local_tokens(Side::Q, rank).len(), rank)?;
        let (carrier, failure) = (self.backend.between_runs()?, self.backend.failure());
        let messages = plan.shift_messages(rank, by)?;
        let (bytes, fingerprint) = (rows.row_bytes(), plan.fingerprint());
        let number = collective::number(&[SHIFT[0], SHIFT[1], fingerprint, by as u64, bytes as u64, rows.kind()]);
        let what = || format!("a shift by {by} of rows of {bytes} bytes over plan {fingerprint:016x}");
        let group = plan.mesh().group_of(rank);
        collective::agreed(carrier.end(), failure, group, number, what, || {
            (0..plan.local_tokens(Side::Q, rank).len()).for_each(|row| rows.fill(row));
            if bytes == 0 { Ok(()) } else { moved(carrier, &messages, &mut rows) }
        })?;
        Ok(rows)
    }
}

/// Copies rows that this rank has, and exchanges those that others have.
fn moved(carrier: Carrier<'_>, messages: &[ShiftMessage], rows: &mut dyn ShiftedRows) -> Result<()> {
    let (rank, world, row_bytes) = (carrier.end().rank(), carrier.end().world(), rows.row_bytes());
    // By peer.
    let (mut sends, mut recvs) = (vec![Vec::new(); world], vec![Vec::new(); world]);
    let mut row_of = vec![0; row_bytes];
    for m in messages {
        match (m.owner == rank, m.reader == rank) {
            (true, true) => {
                for i in 0..m.rows {
                    rows.read(m.from + i, &mut row_of);
                    rows.write(m.to + i, &row_of);
                }
            }
            (true, false) => {
                let packet: &mut Vec<u8> = &mut sends[m.reader];
                for i in 0..m.rows {
                    rows.read(m.from + i, &mut row_of);
                    packet.extend_from_slice(&row_of);
                }
            }
            // Each message is between this rank and another.
            _ => {
                let packet: &mut Vec<u8> = &mut recvs[m.owner];
                packet.resize(packet.len() + m.rows * row_bytes, 0);
            }
        }
    }
    exchange(carrier, &sends, &mut recvs)?;
    let mut taken = vec![0; world];
    for m in messages.iter().filter(|m| m.owner != rank && m.reader == rank) {
        let packet = &recvs[m.owner][taken[m.owner]..][..m.rows * row_bytes];
        packet.chunks_exact(row_bytes).zip(m.to..).for_each(|(from, row)| rows.write(row, from));
        taken[m.owner] += packet.len();
    }
    Ok(())
}

/// Sends each peer its packet and receives the packets of the peers, in at most one exchange.
fn exchange(carrier: Carrier<'_>, sends: &[Vec<u8>], recvs: &mut [Vec<u8>]) -> Result<()> {
    let rooms = |packets: &[Vec<u8>]| -> Result<Vec<(usize, WireBuffer)>> {
        let full = packets.iter().enumerate().filter(|(_, packet)| !packet.is_empty());
        full.map(|(peer, packet)| Ok((peer, carrier.room(packet.len())?))).collect()
    };
    let (mut from, mut to) = (rooms(sends)?, rooms(recvs)?);
    if from.is_empty() && to.is_empty() {
        return Ok(());
    }
    for (peer, room) in &mut from {
        room.put(&sends[*peer])?;
    }
    let (sent, received) = [&mut from, &mut to].map(|rooms| rooms.iter_mut().map(|(peer, room)| (*peer, room))).into();
    carrier.exchange(Label::new("shift", 0), sent, received)?;
    to.iter().try_for_each(|(peer, room)| room.get(&mut recvs[*peer]))
}
