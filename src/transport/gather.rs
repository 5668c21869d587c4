// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gathers bytes of all ranks on rank 0, with the offset of each rank's clock.
//!
//! Rank 0 asks each rank in turn for the time, several times. The time in the answer of the fastest round trip is that
//! of its middle, with an error of at most half the round trip (Cristian, 1989). On one machine or one rack this is
//! about ten microseconds, enough for a picture of operations that take milliseconds. Then the rank sends the number of
//! its bytes, and the bytes.
//!
//! Ranks that are not asked yet wait. In a world of a thousand this takes a second or two; deadlines must be longer.

use std::vec::Vec;

use super::{
    Label,
    carrier::{self, Carrier, WireBuffer},
};
use crate::error::{Error, Result};

/// How often a rank is asked for the time.
const ROUNDS: u32 = 16;

/// The contribution of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gathered {
    /// The difference to add to times of the rank's clock to get times of rank 0's clock.
    pub(crate) offset_ns: i64,
    pub(crate) bytes: Vec<u8>,
}

/// One question for the time: when rank 0 sent it, the time in the answer, and when the answer had arrived.
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    sent: u64,
    there: u64,
    back: u64,
}

/// The offset of the other clock, from the quickest round trip.
fn offset(trips: &[RoundTrip]) -> i64 {
    let quickest = trips.iter().min_by_key(|trip| trip.back.saturating_sub(trip.sent));
    // Counts of nanoseconds wrap in the same way on both sides, so that their difference is small.
    quickest.map_or(0, |t| (t.sent + t.back.saturating_sub(t.sent) / 2).wrapping_sub(t.there) as i64)
}

/// All ranks call it, each with its bytes and its own clock in nanoseconds. Rank 0 gets the bytes of all ranks, in rank
/// order; other ranks get nothing.
pub(crate) fn gather(carrier: Carrier<'_>, now: &dyn Fn() -> u64, mine: &[u8]) -> Result<Vec<Gathered>> {
    let (rank, world) = (carrier.end().rank(), carrier.end().world());
    if world == 1 {
        return Ok(Vec::from([Gathered { offset_ns: 0, bytes: mine.to_vec() }]));
    }
    let mut word = carrier.room(8)?;
    if rank != 0 {
        for step in 0..ROUNDS {
            receive(carrier, step, 0, &mut word)?;
            send(carrier, step, 0, &mut word, now())?;
        }
        send(carrier, ROUNDS, 0, &mut word, mine.len() as u64)?;
        if !mine.is_empty() {
            let mut room = carrier.room(mine.len())?;
            room.put(mine)?;
            carrier.send(Label::new("gather", 0), 0, &mut room)?;
        }
        return Ok(Vec::new());
    }
    let mut all = Vec::from([Gathered { offset_ns: 0, bytes: mine.to_vec() }]);
    for peer in 1..world {
        let mut trips = Vec::new();
        for step in 0..ROUNDS {
            let sent = now();
            send(carrier, step, peer, &mut word, 0)?;
            let there = receive(carrier, step, peer, &mut word)?;
            trips.push(RoundTrip { sent, there, back: now() });
        }
        let length = receive(carrier, ROUNDS, peer, &mut word)?;
        let length =
            usize::try_from(length).map_err(|_| Error::invalid("bytes", length, "a number that fits into memory"))?;
        let mut bytes = carrier::zeros(length)?;
        if length > 0 {
            let mut room = carrier.room(length)?;
            carrier.receive(Label::new("gather", 0), peer, &mut room)?;
            room.get(&mut bytes)?;
        }
        all.push(Gathered { offset_ns: offset(&trips), bytes });
    }
    Ok(all)
}

fn send(carrier: Carrier<'_>, step: u32, peer: usize, word: &mut WireBuffer, number: u64) -> Result<()> {
    word.put(&number.to_ne_bytes())?;
    carrier.send(Label::new("clock", step), peer, word)
}

fn receive(carrier: Carrier<'_>, step: u32, peer: usize, word: &mut WireBuffer) -> Result<u64> {
    let mut bytes = [0; 8];
    carrier.receive(Label::new("clock", step), peer, word)?;
    word.get(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::local;
    use std::{
        thread,
        time::{Duration, Instant},
        vec,
    };

    #[test]
    fn the_quickest_trip_tells_the_offset() {
        let trip = |sent, there, back| RoundTrip { sent, there, back };
        assert_eq!(offset(&[]), 0);
        // The middle of 100..110 is the other clock's 5; the slow trips say other things.
        assert_eq!(offset(&[trip(0, 3, 90), trip(100, 5, 110), trip(200, 9, 290)]), 100);
        assert_eq!(offset(&[trip(5, 1_000_000, 7)]), -999_994);
        // A clock that stepped back during a trip.
        assert_eq!(offset(&[trip(7, 7, 5)]), 0);
    }

    /// Clocks that are seconds apart come within a round trip of each other, and bytes of any number arrive.
    #[test]
    fn clocks_apart_are_brought_together() {
        let began = Instant::now();
        let now = |rank: usize| began.elapsed().as_nanos() as u64 + [50, 7, 900, 0][rank] * 1_000_000_000;
        let given = |rank: usize| vec![rank as u8; [3, 0, 100_000, 1][rank]];
        let all = thread::scope(|scope| {
            let ends = local::group(4, Duration::from_secs(20)).unwrap();
            let ranks: Vec<_> = ends
                .into_iter()
                .enumerate()
                .map(|(rank, end)| {
                    scope.spawn(move || gather(Carrier::Host(&end), &|| now(rank), &given(rank)).unwrap())
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(all[1..].iter().all(Vec::is_empty));
        for (rank, got) in all[0].iter().enumerate() {
            assert_eq!(got.bytes, given(rank));
            let exact = 50_000_000_000 - [50, 7, 900, 0][rank] * 1_000_000_000;
            assert!((got.offset_ns - exact).abs() < 500_000_000, "{rank}: {} for {exact}", got.offset_ns);
        }
        assert_eq!(all[0].len(), 4);
    }
}
