// SPDX-License-Identifier: MIT OR Apache-2.0
//! A schedule for a device: launches, events and exchanges in one flat list, made once.
//!
//! [`Sequence::record`] executes the schedule like a run on the CPU ([`perform`]), but with symbols for addresses: it
//! makes the launches of every call and uploads their metadata to the device. The plan does not determine the addresses
//! and strides of the caller's tensors and the address of the workspace: a run writes those into parameters and
//! messages, and then enqueues the list. It allocates nothing, uploads nothing and makes no queries to the driver.

use std::{ops::Range, vec::Vec};

use super::{
    disagreements::Disagreements,
    tracer::{Named, Tracer},
};
use crate::{
    call::{Attend, AttendBackward, Delta, Merge, RawStream, RawTensor, SinkGradient, Transform},
    device::driver::CudaEvent,
    error::Result,
    kernel::cuda::{
        Cuda,
        base_addresses::{BaseAddresses, BaseOffset, BaseShapes},
        recorded::{LaunchRecorder, RecordedLaunches},
        tags::{self, RunCount, TAG_BYTES},
    },
    plan::Plan,
    runtime::{
        Bindings, bind,
        ops::{BufferAddresses, Operations, perform},
        prepared::Prepared,
        tags::Tags,
    },
    schedule::{Lane, TensorId, expand::Expansion},
    transport::{DeviceTransport, Label, Message},
};

/// The number of the stream of a lane.
const fn stream_of(lane: Lane) -> usize {
    match lane {
        Lane::Compute => 0,
        Lane::Communication => 1,
    }
}

/// The base of a tensor of the caller's. Base 0 is the workspace.
pub(super) const fn base_of(tensor: TensorId) -> usize {
    tensor as usize + 1
}

/// A command for one of the two streams.
enum StreamCommand {
    /// Begin and end of an operation: only a trace uses them.
    Begin {
        stream: usize,
        op: u32,
    },
    End {
        stream: usize,
    },
    /// Wait for an event of the other stream.
    Hold {
        stream: usize,
        event: u32,
    },
    /// Record an event.
    Mark {
        stream: usize,
        event: u32,
    },
    Launch {
        stream: usize,
        launch: u32,
    },
    /// On the transport's stream.
    Exchange {
        label: Label,
        sends: Range<u32>,
        recvs: Range<u32>,
    },
}

/// The launches, events and exchanges of one schedule, in the order in which they are enqueued.
pub(super) struct Sequence {
    steps: Vec<StreamCommand>,
    launches: RecordedLaunches,
    messages: Vec<Message>,
    /// The messages whose addresses a run sets, and where their bytes are. The addresses of tags are fixed.
    offsets: Vec<(u32, BaseOffset)>,
    events: Vec<CudaEvent>,
    /// By operation index.
    named: Vec<Named>,
}

// SAFETY: the addresses in the messages are left from the last run; the next run overwrites them before it uses them.
unsafe impl Send for Sequence {}

/// Records the calls of a schedule.
struct Recording<'a> {
    recorder: LaunchRecorder<'a>,
    alibi_slopes: RawTensor,
    /// The symbol of the tags, if there are exchanges.
    tags: Option<*mut u8>,
    disagreements: &'a Disagreements,
    stream: usize,
    steps: Vec<StreamCommand>,
    messages: Vec<Message>,
    offsets: Vec<(u32, BaseOffset)>,
}

impl Recording<'_> {
    /// Makes and lists the launches of one call.
    fn launch(&mut self, make: impl FnOnce(&mut LaunchRecorder<'_>) -> Result<()>) -> Result<()> {
        let first = self.recorder.len() as u32;
        make(&mut self.recorder)?;
        let stream = self.stream;
        self.steps.extend((first..self.recorder.len() as u32).map(|launch| StreamCommand::Launch { stream, launch }));
        Ok(())
    }

    fn list(&mut self, messages: &[Message]) -> Range<u32> {
        let begin = self.messages.len() as u32;
        let moved = (begin..).zip(messages).filter(|(_, m)| !tags::is_of_metadata(m.ptr));
        self.offsets.extend(moved.map(|(i, m)| (i, self.recorder.locate(m.ptr))));
        self.messages.extend_from_slice(messages);
        begin..self.messages.len() as u32
    }
}

// Nothing here accesses memory. The run that later sets the addresses guarantees the conditions of the calls.
impl Operations for Recording<'_> {
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        self.launch(|recorder| recorder.attend(args))
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        self.launch(|recorder| recorder.attend_backward(args))
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        self.launch(|recorder| recorder.transform(args))
    }

    unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        self.launch(|recorder| recorder.merge(args))
    }

    unsafe fn delta(&mut self, args: &Delta) -> Result<()> {
        self.launch(|recorder| recorder.delta(args))
    }

    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()> {
        self.launch(|recorder| recorder.sink_gradient(args))
    }

    unsafe fn sink_total(&mut self, _: &RawTensor, _: &RawTensor) -> Result<()> {
        unreachable!("only reproducible plans sum exactly, and devices refuse them")
    }

    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let (sent, received) = (self.list(sends), self.list(recvs));
        self.steps.push(StreamCommand::Exchange { label, sends: sent, recvs: received });
        let Some(at) = self.tags.filter(|_| !recvs.is_empty()) else { return Ok(()) };
        let (tags, rows): (Vec<Message>, Vec<Message>) = recvs.iter().partition(|m| tags::is_of_metadata(m.ptr));
        let slot = |m: &Message| (m.ptr as usize - at as usize) / TAG_BYTES;
        // Tags are numbered in the order in which they arrive.
        let first = tags.first().map_or(0, slot);
        debug_assert!(tags.iter().map(slot).eq(first..first + tags.len()));
        let rows: Vec<_> = rows.iter().map(|m| (m.ptr, m.bytes)).collect();
        let disagreements = self.disagreements;
        self.launch(|recorder| recorder.arrived(at, first..first + tags.len(), &rows, &disagreements.device))
    }

    fn alibi_slopes(&self, _: &Plan) -> RawTensor {
        self.alibi_slopes
    }
}

impl Sequence {
    /// Makes the sequence of a schedule, whose kernels were loaded. The host waits for the upload of the metadata.
    /// `runs` are those of the schedule's group; none where the rank is alone in it.
    pub(super) fn record(
        cuda: &Cuda,
        prepared: &mut Prepared,
        runs: Option<&RunCount>,
        disagreements: &Disagreements,
    ) -> Result<Self> {
        let fingerprint = prepared.fingerprint();
        let plan = prepared.plan.clone();
        let tensors = bind::placeholders(&prepared.expected, |tensor, dtype, tokens, heads, dim| {
            RawTensor::compact(BaseShapes::symbol(base_of(tensor)), dtype, tokens, heads, dim)
        });
        let shapes = BaseShapes::new(tensors.all().iter().map(|t| (t.heads, t.dim, t.dtype)));
        let mut recorder = LaunchRecorder::new(cuda, shapes);
        let mut recording = Recording {
            alibi_slopes: plan
                .problem()
                .alibi_slopes()
                .map_or(RawTensor::NONE, |alibi_slopes| recorder.table(alibi_slopes)),
            recorder,
            tags: None,
            disagreements,
            stream: 0,
            steps: Vec::new(),
            messages: Vec::new(),
            offsets: Vec::new(),
        };
        let memory = BufferAddresses { tensors, workspace: BaseShapes::symbol(0) };
        let Prepared { schedule, run, compute: listing, .. } = prepared;
        if let Some(runs) = runs {
            let tags = Tags::new(&plan, *run, schedule, &mut Expansion::new(schedule));
            disagreements.add(schedule.rank, fingerprint, run.describe(&plan), tags.senders());
            let count = 1 + tags.senders().len();
            let mut at = core::ptr::null_mut();
            recording.stream = stream_of(Lane::Communication);
            recording.launch(|recorder| {
                at = recorder.begin_run(fingerprint, count, runs)?;
                Ok(())
            })?;
            recording.tags = Some(at);
            listing.tag(|_| tags.on_device(at, TAG_BYTES));
        }
        let mut events: Vec<Option<u32>> = schedule.ops.iter().map(|_| None).collect();
        let mut count = 0;
        for after in schedule.ops.iter().filter_map(|op| op.after) {
            events[after as usize].get_or_insert_with(|| {
                count += 1;
                count - 1
            });
        }
        let mut named = Vec::with_capacity(schedule.ops.len());
        for (i, op) in schedule.ops.iter().enumerate() {
            let stream = stream_of(op.lane);
            recording.stream = stream;
            if let Some(event) = op.after.and_then(|after| events[after as usize]) {
                recording.steps.push(StreamCommand::Hold { stream, event });
            }
            recording.steps.push(StreamCommand::Begin { stream, op: i as u32 });
            // SAFETY: `Recording` touches no memory.
            let bytes = unsafe { perform(&plan, schedule, i, &memory, listing, &mut recording) }?;
            recording.steps.push(StreamCommand::End { stream });
            named.push(Named::new(op, bytes));
            if let Some(event) = events[i] {
                recording.steps.push(StreamCommand::Mark { stream, event });
            }
        }
        let Recording { recorder, steps, mut messages, offsets, .. } = recording;
        let launches = recorder.keep()?;
        for message in &mut messages {
            message.ptr = launches.metadata_address(message.ptr).unwrap_or(message.ptr);
        }
        Ok(Self {
            steps,
            launches,
            messages,
            offsets,
            named,
            events: (0..count).map(|_| CudaEvent::new(cuda.context())).collect::<Result<_>>()?,
        })
    }

    /// Bytes that the sequence keeps on the device.
    pub(super) fn bytes(&self) -> usize {
        self.launches.bytes()
    }

    /// Whether the sequence has exchanges with other ranks.
    pub(super) fn exchanges(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Whether the rows of a tensor must begin at multiples of 16 bytes, which not all tensors need.
    pub(super) fn must_align(&self, tensor: TensorId) -> bool {
        self.launches.must_align(base_of(tensor))
    }

    /// Enqueues the sequence on the streams of the two lanes; the second is the transport's. While a trace is recorded,
    /// also records events around each operation. The context is current.
    ///
    /// # Safety
    /// The tensors are those of the plan, checked. In the order of the streams, they and the workspace are valid when
    /// the run reaches them, and nothing else uses them until the run is over. `cuda` is the device of
    /// [`Sequence::record`].
    pub(super) unsafe fn enqueue(
        &mut self,
        tensors: &Bindings,
        workspace: *mut u8,
        streams: [RawStream; 2],
        cuda: &Cuda,
        transport: &dyn DeviceTransport,
        mut tracer: Option<&mut Tracer>,
    ) -> Result<()> {
        let bases = BaseAddresses::new(workspace, tensors.all());
        self.launches.set_bases(&bases);
        for &(i, place) in &self.offsets {
            self.messages[i as usize].ptr = place.address(&bases) as usize as *mut u8;
        }
        let messages = |range: &Range<u32>| &self.messages[range.start as usize..range.end as usize];
        for step in &self.steps {
            match step {
                StreamCommand::Begin { stream, op } => {
                    if let Some(tracer) = &mut tracer {
                        tracer.begin(self.named[*op as usize], streams[*stream])?;
                    }
                }
                StreamCommand::End { stream } => {
                    if let Some(tracer) = &mut tracer {
                        tracer.end(streams[*stream])?;
                    }
                }
                StreamCommand::Hold { stream, event } => self.events[*event as usize].hold(streams[*stream])?,
                StreamCommand::Mark { stream, event } => self.events[*event as usize].record(streams[*stream])?,
                StreamCommand::Launch { stream, launch } => {
                    // SAFETY: the bases are those of this run; only attention counts in shared words, and schedules put
                    // all of it on one lane; the events keep the order that the schedule asks for.
                    unsafe { self.launches.start(*launch as usize, cuda, streams[*stream]) }?;
                }
                StreamCommand::Exchange { label, sends, recvs } => {
                    // SAFETY: the bases are those of this run; only attention counts in shared words, and schedules put
                    // all of it on one lane; the events keep the order that the schedule asks for: the transport's
                    // stream waits for all work on the memory that the exchange sends or overwrites, and readers of
                    // that memory wait for the transport's stream.
                    unsafe { transport.exchange(*label, messages(sends), messages(recvs)) }?;
                }
            }
        }
        Ok(())
    }
}
