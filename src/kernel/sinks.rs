// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gradient of the sinks.
//!
//! A sink is a logit without a value: it takes probability `exp(sink_h − lse)` of every row of its head and gives
//! nothing for it. Its gradient is therefore `dsink_h = −Σ_rows exp(sink_h − lse) · delta`, and needs neither keys nor
//! scores. The sum over a rank's rows is kept in f64, whatever the element type: it is as long as the sequence.

use crate::{
    element::{Dtype, Element},
    error::{Error, Result},
    kernel::SinkGradient,
};

/// Sums over the rows that are given; the result is written, not added.
///
/// # Safety
/// The tensors describe memory that is valid for the call: `lse`, `delta` and `sinks` for reads, `dsinks` for writes,
/// and `dsinks` overlaps none of the others.
pub unsafe fn sink_gradient(args: &SinkGradient) -> Result<()> {
    let SinkGradient { lse, delta, sinks, dsinks } = args;
    for (name, t) in [("delta", delta), ("dsinks", dsinks)] {
        if t.dtype != lse.dtype {
            return Err(Error::invalid(
                std::format!("{name}.dtype"),
                t.dtype,
                std::format!("that of lse, {}", lse.dtype),
            ));
        }
    }
    for (name, t) in [("delta", delta), ("sinks", sinks), ("dsinks", dsinks)] {
        if t.heads != lse.heads {
            return Err(Error::invalid(
                std::format!("{name}.heads"),
                t.heads,
                std::format!("that of lse, {}", lse.heads),
            ));
        }
    }
    if delta.tokens != lse.tokens || sinks.dtype != Dtype::F32 {
        let found = std::format!("{} tokens, sinks of {}", delta.tokens, sinks.dtype);
        return Err(Error::invalid("delta, sinks", found, std::format!("{} tokens, sinks of f32", lse.tokens)));
    }
    // SAFETY: the caller's promise; the two types were checked to be those of the tensors.
    unsafe {
        match lse.dtype {
            Dtype::F32 => sum::<f32>(args),
            Dtype::F64 => sum::<f64>(args),
            other => return Err(Error::invalid("lse.dtype", other, "an accumulator's type: f32 or f64")),
        }
    }
    Ok(())
}

unsafe fn sum<A: Element>(args: &SinkGradient) {
    let SinkGradient { lse, delta, sinks, dsinks } = args;
    for h in 0..lse.heads {
        // SAFETY: `h` is a head of all four tensors, which the caller vouches for.
        let sink = f64::from(unsafe { *sinks.heads(h, 1).ptr.cast::<f32>() });
        let (lse, delta) = (lse.heads(h, 1), delta.heads(h, 1));
        let mut total = 0.0f64;
        for t in 0..lse.tokens as i64 {
            // SAFETY: `t` is a row of both tensors; strides are in elements of type A.
            let (l, d) = unsafe {
                (
                    (*lse.ptr.cast::<A>().offset((t * lse.token_stride) as isize)).to_f64(),
                    (*delta.ptr.cast::<A>().offset((t * delta.token_stride) as isize)).to_f64(),
                )
            };
            // A row whose only probability would be an absent sink has none to give.
            if l > f64::NEG_INFINITY {
                total -= (sink - l).exp() * d;
            } else if l.is_nan() {
                total = f64::NAN;
            }
        }
        // SAFETY: as above, and the tensor is the call's to write.
        unsafe { *dsinks.heads(h, 1).ptr.cast::<A>() = A::from_f64(total) };
    }
}
