// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check of an error by tests of bad input.

use cpattn::{Error, Result};

/// Refused before anything moved, in these words.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T>, words: &[&str]) {
    let error = result.expect_err("accepted");
    assert!(matches!(error, Error::Invalid { .. } | Error::Unsupported { .. }), "{error:?}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
}
