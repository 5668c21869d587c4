// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slices of the masks that people train.
//!
//! Each function returns the slices of one kind of mask, for [`Batch::with_slices`](crate::Batch::with_slices). They
//! have no limits of their own beyond those of the mask: a problem's window applies inside each slice, by true
//! distances. In the pictures a row is a query, a column a key, `#` an allowed pair.

use alloc::{format, vec::Vec};
use core::ops::Range;

use super::Slice;
pub use super::dense::{DENSE, from_dense};
use crate::error::{Error, Result};

/// The runs of tokens between consecutive entries of `cu_seqlens`.
fn documents_of(cu_seqlens: &[i32]) -> impl Iterator<Item = Range<usize>> + '_ {
    cu_seqlens.windows(2).map(|w| w[0].max(0) as usize..w[1].max(0) as usize)
}

/// Consecutive runs of these lengths.
fn runs(lengths: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    lengths.iter().scan(0usize, |at, &n| {
        let begin = *at;
        // What no batch has is refused there.
        *at = begin.saturating_add(n);
        Some(begin..*at)
    })
}

/// Causal documents: the mask of a batch without slices.
///
/// ```text
/// #....
/// ##...
/// ..#..
/// ..##.
/// ..###
/// ```
pub fn documents(cu_seqlens: &[i32]) -> Vec<Slice> {
    documents_of(cu_seqlens).map(|d| Slice::new(d.clone(), d).causal()).collect()
}

/// One prompt and several answers to it: each answer sees the prompt and itself, and its positions follow the prompt's.
///
/// `shared_prefix(2, &[2, 1])`:
/// ```text
/// #....
/// ##...
/// ###..
/// ####.
/// ##..#
/// ```
pub fn shared_prefix(prefix: usize, branches: &[usize]) -> Vec<Slice> {
    let parents = (0..=branches.len()).map(|i| (i > 0).then_some(0)).collect::<Vec<_>>();
    let lengths = core::iter::once(prefix).chain(branches.iter().copied()).collect::<Vec<_>>();
    tree(&parents, &lengths).unwrap_or_default()
}

/// A tree of turns: each node sees its ancestors and itself, causally, and its positions follow its parent's.
///
/// Nodes are laid out in the order given; a node's parent comes before it. `tree(&[None, Some(0), Some(0)], &[2, 2,
/// 1])` is the mask of [`shared_prefix`].
///
/// # Errors
///
/// Lists of different lengths, and a parent that does not come before its node.
pub fn tree(parents: &[Option<usize>], lengths: &[usize]) -> Result<Vec<Slice>> {
    if parents.len() != lengths.len() {
        return Err(Error::invalid("parents", format!("of length {}", parents.len()), lengths.len()));
    }
    let nodes: Vec<Range<usize>> = runs(lengths).collect();
    let mut slices = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        if let Some(parent) = parents[i].filter(|&parent| parent >= i) {
            let expected = format!("a node before {i}, or none");
            return Err(Error::invalid(format!("parents[{i}]"), parent, expected));
        }
        // From the node to the root: runs of tokens that touch are one slice.
        let mut path: Vec<Range<usize>> = Vec::new();
        let mut at = Some(i);
        while let Some(n) = at {
            match path.last_mut() {
                Some(later) if nodes[n].end == later.start => later.start = nodes[n].start,
                _ => path.push(nodes[n].clone()),
            }
            at = parents[n];
        }
        let mut position = 0;
        let before = path.iter().fold(0usize, |sum, run| sum.saturating_add(run.len())) - node.len();
        for run in path.into_iter().rev() {
            // Keys from `position` on; the first query is at `before`.
            let start = (before as i64).saturating_sub(position);
            position = position.saturating_add(run.len() as i64);
            slices.push(Slice::new(node.clone(), run).q_start(start).causal());
        }
    }
    Ok(slices)
}

/// Causal documents whose first tokens, as many as `prefixes` says, see each other in both directions.
///
/// `prefix_lm(&[0, 5], &[3])`:
/// ```text
/// ###..
/// ###..
/// ###..
/// ####.
/// #####
/// ```
///
/// # Errors
///
/// Lists of different lengths, and a prefix longer than its document.
pub fn prefix_lm(cu_seqlens: &[i32], prefixes: &[usize]) -> Result<Vec<Slice>> {
    let documents = cu_seqlens.len().saturating_sub(1);
    if prefixes.len() != documents {
        let expected = format!("{documents}: one for each document");
        return Err(Error::invalid("prefixes", format!("of length {}", prefixes.len()), expected));
    }
    let mut slices = Vec::new();
    for (d, (document, &prefix)) in documents_of(cu_seqlens).zip(prefixes).enumerate() {
        if prefix > document.len() {
            let expected = format!("at most {}, the tokens of the document", document.len());
            return Err(Error::invalid(format!("prefixes[{d}]"), prefix, expected));
        }
        let end = document.start + prefix;
        slices.push(Slice::new(document.start..end, document.start..end));
        slices.push(Slice::new(end..document.end, document).causal());
    }
    Ok(slices)
}

/// Documents in chunks of `chunk` tokens: a query sees its chunk, causally.
///
/// `chunks(&[0, 5], 2)`:
/// ```text
/// #....
/// ##...
/// ..#..
/// ..##.
/// ....#
/// ```
///
/// # Errors
///
/// A chunk of no tokens.
pub fn chunks(cu_seqlens: &[i32], chunk: usize) -> Result<Vec<Slice>> {
    Ok(blocks(cu_seqlens, chunk, "chunk")?.map(|(_, block)| Slice::new(block.clone(), block).causal()).collect())
}

/// Documents in blocks of `block` tokens that see each other and all blocks before.
///
/// `block_causal(&[0, 5], 2)`:
/// ```text
/// ##...
/// ##...
/// ####.
/// ####.
/// #####
/// ```
///
/// # Errors
///
/// A block of no tokens.
pub fn block_causal(cu_seqlens: &[i32], block: usize) -> Result<Vec<Slice>> {
    Ok(blocks(cu_seqlens, block, "block")?.map(|(start, block)| Slice::new(block.clone(), start..block.end)).collect())
}

/// The blocks of documents, each with the first token of its document.
fn blocks<'a>(
    cu_seqlens: &'a [i32],
    block: usize,
    name: &'static str,
) -> Result<impl Iterator<Item = (usize, Range<usize>)> + 'a> {
    if block == 0 {
        return Err(Error::invalid(name, 0, "at least 1"));
    }
    Ok(documents_of(cu_seqlens).flat_map(move |d| {
        (d.start..d.end).step_by(block).map(move |at| (d.start, at..d.end.min(at.saturating_add(block))))
    }))
}

/// Causal documents in which the tokens of each span, such as those of an image, see each other in both directions.
///
/// `spans(&[0, 5], &[1..4])`:
/// ```text
/// #....
/// ####.
/// ####.
/// ####.
/// #####
/// ```
///
/// # Errors
///
/// A span that is not in one document.
pub fn spans(cu_seqlens: &[i32], spans: &[Range<usize>]) -> Result<Vec<Slice>> {
    let mut slices = documents(cu_seqlens);
    for (i, span) in spans.iter().enumerate().filter(|(_, span)| !span.is_empty()) {
        if !documents_of(cu_seqlens).any(|d| d.start <= span.start && span.end <= d.end) {
            return Err(Error::invalid(format!("spans[{i}]"), format!("{span:?}"), "tokens of one document"));
        }
        slices.push(Slice::new(span.clone(), span.clone()).band(1, i64::MAX));
    }
    Ok(slices)
}

/// Block diffusion over one sequence of `tokens`: its noisy copy, then its clean copy. A noisy block sees itself and
/// the clean blocks before it; a clean block sees itself and the clean blocks before it. Positions of both copies are
/// those of the sequence.
///
/// `block_diffusion(4, 2)`:
/// ```text
/// ##......
/// ##......
/// ..####..
/// ..####..
/// ....##..
/// ....##..
/// ....####
/// ....####
/// ```
///
/// # Errors
///
/// A block of no tokens.
pub fn block_diffusion(tokens: usize, block: usize) -> Result<Vec<Slice>> {
    let cu_seqlens = [0, i32::try_from(tokens).unwrap_or(i32::MAX)];
    let mut slices = Vec::new();
    for (_, noisy) in blocks(&cu_seqlens, block, "block")? {
        let clean = tokens.saturating_add(noisy.start)..tokens.saturating_add(noisy.end);
        let at = noisy.start as i64;
        slices.push(Slice::new(noisy.clone(), noisy.clone()).q_start(0));
        slices.push(Slice::new(noisy, tokens..clean.start).q_start(at));
        slices.push(Slice::new(clean.clone(), tokens..clean.end).q_start(at));
    }
    Ok(slices)
}

/// Pairs of a run of queries and a run of keys, all of which attend to each other: cross-attention, or joint attention
/// of texts and images.
///
/// `pairs(&[(0..2, 0..3), (2..4, 3..5)])`:
/// ```text
/// ###..
/// ###..
/// ...##
/// ...##
/// ```
pub fn pairs(pairs: &[(Range<usize>, Range<usize>)]) -> Vec<Slice> {
    pairs.iter().map(|(q, k)| Slice::new(q.clone(), k.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(slices: &[Slice], q: usize, k: usize) -> Vec<bool> {
        (0..q * k).map(|i| slices.iter().filter(|s| s.allows(i / k, i % k)).count() == 1).collect()
    }

    #[track_caller]
    fn looks(slices: &[Slice], picture: &str) {
        let rows: Vec<&str> = picture.split_whitespace().collect();
        let want: Vec<bool> = rows.concat().chars().map(|c| c == '#').collect();
        let (q, k) = (rows.len(), rows[0].len());
        assert_eq!(dense(slices, q, k), want, "{slices:?}");
        let found = from_dense(&want, k).unwrap();
        assert_eq!(dense(&found, q, k), want, "{found:?}");
    }

    #[test]
    fn makers_draw_their_pictures() {
        looks(&documents(&[0, 2, 5]), "#.... ##... ..#.. ..##. ..###");
        looks(&shared_prefix(2, &[2, 1]), "#.... ##... ###.. ####. ##..#");
        looks(&prefix_lm(&[0, 5], &[3]).unwrap(), "###.. ###.. ###.. ####. #####");
        looks(&chunks(&[0, 5], 2).unwrap(), "#.... ##... ..#.. ..##. ....#");
        looks(&block_causal(&[0, 5], 2).unwrap(), "##... ##... ####. ####. #####");
        looks(&spans(&[0, 5], core::slice::from_ref(&(1..4))).unwrap(), "#.... ####. ####. ####. #####");
        looks(
            &block_diffusion(4, 2).unwrap(),
            "##...... ##...... ..####.. ..####.. ....##.. ....##.. ....#### ....####",
        );
        looks(&pairs(&[(0..2, 0..3), (2..4, 3..5)]), "###.. ###.. ...## ...##");
        // A node of the second level after one of another branch.
        let nodes = tree(&[None, Some(0), Some(0), Some(1)], &[2, 1, 1, 2]).unwrap();
        looks(&nodes, "#..... ##.... ###... ##.#.. ###.#. ###.##");
    }

    /// Positions in a tree are those of the path from the root.
    #[test]
    fn a_branch_is_at_its_distance_from_the_root() {
        let slices = tree(&[None, Some(0), Some(0), Some(1)], &[2, 1, 1, 2]).unwrap();
        let of = |q: i32| slices.iter().filter(move |s| s.q_begin <= q && q < s.q_end);
        // Token 4 is the fourth of the path of tokens 0, 1, 2, 4, 5.
        let runs: Vec<_> = of(4).map(|s| (s.k_begin, s.k_end, s.q_start)).collect();
        assert_eq!(runs, [(0, 3, 3), (4, 6, 0)]);
        assert_eq!(of(3).map(|s| (s.k_begin, s.k_end, s.q_start)).collect::<Vec<_>>(), [(0, 2, 2), (3, 4, 0)]);
    }

    #[test]
    fn refusals_name_the_argument() {
        use alloc::string::ToString;
        assert_eq!(tree(&[None], &[1, 2]).unwrap_err().to_string(), "parents is of length 1, expected 2");
        assert_eq!(
            tree(&[None, Some(1)], &[1, 2]).unwrap_err().to_string(),
            "parents[1] is 1, expected a node before 1, or none"
        );
        assert_eq!(
            prefix_lm(&[0, 3], &[4]).unwrap_err().to_string(),
            "prefixes[0] is 4, expected at most 3, the tokens of the document"
        );
        assert_eq!(
            spans(&[0, 5, 8], &[0..2, 3..7]).unwrap_err().to_string(),
            "spans[1] is 3..7, expected tokens of one document"
        );
        // Numbers that no batch has do not end the program.
        assert_eq!(chunks(&[0, 5, 9], usize::MAX).unwrap().len(), 2);
        for many in [shared_prefix(usize::MAX, &[2, 3]), block_diffusion(usize::MAX, usize::MAX).unwrap()] {
            let batch = crate::batch::Batch::from_lengths(&[9]).unwrap();
            assert!(batch.with_slices(&many).is_err());
        }
        assert_eq!(chunks(&[0, 3], 0).unwrap_err().to_string(), "chunk is 0, expected at least 1");
        assert!(from_dense(&[true; 7], 2).unwrap_err().to_string().starts_with("mask is of length 7"));
    }
}
