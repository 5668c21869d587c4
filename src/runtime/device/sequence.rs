// SPDX-License-Identifier: MIT OR Apache-2.0
//! A schedule for a device: the launches, events and exchanges of its operations, made once.
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
    batch::Side,
    call::{Attend, AttendBackward, Compose, Delta, Merge, MergeAll, RawStream, RawTensor, SinkGradient, Transform},
    device::driver::CudaEvent,
    error::Result,
    kernel::cuda::{
        Cuda, HeldDocuments, HeldRows, PageTable,
        base_addresses::{BaseAddresses, BaseOffset, BaseShapes},
        launch::Launches,
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
    schedule::{Direction, Lane, Purpose, TensorId, expand::Expansion},
    transport::{DeviceTransport, Label, Message},
};

/// The base of a tensor of the caller's. Base 0 is the workspace.
pub(super) const fn base_of(tensor: TensorId) -> usize {
    bind::place_of(tensor) + 1
}

/// The commands of one operation on the stream of its lane.
struct OpCommands {
    lane: Lane,
    named: Named,
    /// The operation whose event the stream waits for first.
    after: Option<u32>,
    commands: Vec<Command>,
    /// Recorded behind the commands, if operations of the other lane wait for it.
    event: Option<CudaEvent>,
}

enum Command {
    /// By its number among the launches.
    Launch(usize),
    Exchange {
        label: Label,
        sends: Range<usize>,
        recvs: Range<usize>,
    },
}

/// The launches, events and exchanges of one schedule, in the order in which they are enqueued.
pub(super) struct Sequence {
    /// Whether launch 0 begins a run, on the stream of communication.
    has_tags: bool,
    /// Whether it is a forward of attention, which may be asked for the largest scores.
    forward: bool,
    ops: Vec<OpCommands>,
    launches: RecordedLaunches,
    messages: Vec<Message>,
    /// The messages whose addresses a run sets, and where their bytes are. The addresses of tags are fixed.
    offsets: Vec<(usize, BaseOffset)>,
    /// The document of which the rank has the most k rows, and how many; for a forward over pages.
    longest: (usize, u64),
}

// SAFETY: the addresses in the messages are left from the last run; the next run overwrites them before it uses them.
unsafe impl Send for Sequence {}

/// Records the calls of a schedule.
struct Recording<'a> {
    cuda: &'a Cuda,
    recorder: LaunchRecorder,
    alibi_slopes: RawTensor,
    /// The symbol of the tags, if there are exchanges.
    tags: Option<*mut u8>,
    disagreements: &'a Disagreements,
    /// Those of the operation that is being recorded.
    commands: Vec<Command>,
    messages: Vec<Message>,
    offsets: Vec<(usize, BaseOffset)>,
}

impl Recording<'_> {
    /// Makes and lists the launches of one call.
    fn launch(&mut self, make: impl FnOnce(&Cuda, &mut LaunchRecorder) -> Result<Launches>) -> Result<()> {
        let cuda = self.cuda;
        self.commands.extend(self.recorder.add(|recorder| make(cuda, recorder))?.map(Command::Launch));
        Ok(())
    }

    fn list(&mut self, messages: &[Message]) -> Range<usize> {
        let begin = self.messages.len();
        let moved = (begin..).zip(messages).filter(|(_, m)| !tags::is_of_metadata(m.ptr));
        self.offsets.extend(moved.map(|(i, m)| (i, self.recorder.locate(m.ptr))));
        self.messages.extend_from_slice(messages);
        begin..self.messages.len()
    }
}

// Nothing here accesses memory. The run that later sets the addresses guarantees the conditions of the calls.
impl Operations for Recording<'_> {
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        self.launch(|cuda, recorder| cuda.attend_launches(args, recorder))
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        self.launch(|cuda, recorder| cuda.attend_backward_launches(args, recorder))
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        self.launch(|cuda, recorder| cuda.transform_launches(args, recorder))
    }

    unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        self.launch(|cuda, recorder| cuda.merge_launches(args, recorder.checker(cuda)))
    }

    unsafe fn merge_all(&mut self, args: &MergeAll<'_>) -> Result<()> {
        self.launch(|cuda, recorder| cuda.combine_launches(args, recorder))
    }

    unsafe fn compose(&mut self, _: &Compose<'_>) -> Result<()> {
        unreachable!("a scan on a device is refused before it is recorded")
    }

    unsafe fn delta(&mut self, args: &Delta) -> Result<()> {
        self.launch(|cuda, recorder| cuda.delta_launches(args, recorder.checker(cuda)))
    }

    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()> {
        self.launch(|cuda, recorder| cuda.sink_gradient_launches(args, recorder.checker(cuda)))
    }

    unsafe fn sink_total(&mut self, _: &RawTensor, _: &RawTensor) -> Result<()> {
        unreachable!("only reproducible plans sum exactly, and devices refuse them")
    }

    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let (sent, received) = (self.list(sends), self.list(recvs));
        self.commands.push(Command::Exchange { label, sends: sent, recvs: received });
        let Some(at) = self.tags.filter(|_| !recvs.is_empty()) else { return Ok(()) };
        let (tags, rows): (Vec<Message>, Vec<Message>) = recvs.iter().partition(|m| tags::is_of_metadata(m.ptr));
        let slot = |m: &Message| (m.ptr as usize - at as usize) / TAG_BYTES;
        // Tags are numbered in the order in which they arrive.
        let first = tags.first().map_or(0, slot);
        debug_assert!(tags.iter().map(slot).eq(first..first + tags.len()));
        let rows: Vec<_> = rows.iter().map(|m| (m.ptr, m.bytes)).collect();
        let (compared, notice) = (first..first + tags.len(), &self.disagreements.device);
        self.launch(|cuda, recorder| recorder.arrived(cuda, at, compared, &rows, notice))
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
        // A run brings another one.
        let tensors = tensors.with_dropout_seed(plan.problem().dropout().map(|_| 0));
        let shapes = BaseShapes::new(tensors.all().iter().map(|t| (t.heads, t.dim, t.dtype)));
        let mut recorder = LaunchRecorder::of_plan(shapes);
        let mut longest = (0, 0);
        if prepared.over_pages {
            let (held, most) = held_documents(&plan, prepared.schedule.rank);
            (recorder, longest) = (recorder.over_pages(held), most);
        }
        let alibi_slopes = plan.problem().alibi_slopes().map(|slopes| recorder.table(slopes)).transpose()?;
        let mut recording = Recording {
            cuda,
            alibi_slopes: alibi_slopes.unwrap_or(RawTensor::NONE),
            recorder,
            tags: None,
            disagreements,
            commands: Vec::new(),
            messages: Vec::new(),
            offsets: Vec::new(),
        };
        let memory = BufferAddresses { tensors, workspace: BaseShapes::symbol(0) };
        let Prepared { schedule, run, compute: listing, .. } = prepared;
        if let Some(runs) = runs {
            let tags = Tags::new(&plan, *run, schedule, &mut Expansion::new(schedule));
            disagreements.add(schedule.rank, &plan, *run, tags.senders());
            let count = 1 + tags.senders().len();
            let at = recording.recorder.tags(count)?;
            recording.recorder.add(|recorder| recorder.begin_run(cuda, fingerprint, (at, count), runs))?;
            recording.tags = Some(at);
            listing.tag(|_| tags.on_device(at, TAG_BYTES));
        }
        let mut ops = Vec::with_capacity(schedule.ops.len());
        for (i, op) in schedule.ops.iter().enumerate() {
            // SAFETY: `Recording` touches no memory.
            let bytes = unsafe { perform(&plan, schedule, i, &memory, listing, &mut recording) }?;
            let commands = core::mem::take(&mut recording.commands);
            let named = Named::new(op, bytes);
            ops.push(OpCommands { lane: op.lane, named, after: op.after, commands, event: None });
        }
        for after in schedule.ops.iter().filter_map(|op| op.after) {
            let event = &mut ops[after as usize].event;
            if event.is_none() {
                *event = Some(CudaEvent::new(cuda.context())?);
            }
        }
        let forward = *run == Purpose::Attention(Direction::Forward);
        let Recording { recorder, tags, mut messages, offsets, .. } = recording;
        let launches = recorder.keep(cuda)?;
        for message in &mut messages {
            message.ptr = launches.metadata_address(message.ptr).unwrap_or(message.ptr);
        }
        Ok(Self { has_tags: tags.is_some(), forward, ops, launches, messages, offsets, longest })
    }

    /// The document of which the rank has the most k rows, and how many, of a forward over pages.
    pub(super) fn longest(&self) -> (usize, u64) {
        self.longest
    }

    /// Sets the table of pages of the run that is enqueued next.
    pub(super) fn set_pages(&mut self, table: PageTable) {
        self.launches.set_pages(table);
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
    /// [`Sequence::record`]. `compared` is what ranks compare.
    pub(super) unsafe fn enqueue(
        &mut self,
        (tensors, compared): (&Bindings, u64),
        workspace: *mut u8,
        streams: [RawStream; 2],
        cuda: &Cuda,
        transport: &dyn DeviceTransport,
        mut tracer: Option<&mut Tracer>,
    ) -> Result<()> {
        let bases = BaseAddresses::new(workspace, tensors.all());
        self.launches.set_bases(&bases);
        if let Some(seed) = tensors.dropout_seed() {
            self.launches.set_seed(seed);
            if self.has_tags {
                self.launches.set_fingerprint(0, compared);
            }
        }
        for &(i, place) in &self.offsets {
            self.messages[i].ptr = place.address(&bases) as usize as *mut u8;
        }
        let stream_of = |lane: Lane| streams[lane as usize];
        // SAFETY: the bases are those of this run; only attention counts in shared words, and schedules put all of it
        // on one lane; the events keep the order that the schedule asks for.
        let start = |i, lane| unsafe { self.launches.start(i, cuda, stream_of(lane)) };
        if self.has_tags {
            start(0, Lane::Communication)?;
        }
        let largest = tensors.get(TensorId::MaxLogit);
        if self.forward && !largest.is_none() {
            // SAFETY: a tensor of the plan, as promised; all launches that raise it are on the same stream.
            unsafe { cuda.clear_max_logit(largest, stream_of(Lane::Compute)) }?;
        }
        for op in &self.ops {
            let stream = stream_of(op.lane);
            if let Some(event) = op.after.and_then(|after| self.ops[after as usize].event.as_ref()) {
                event.make_stream_wait(stream)?;
            }
            if let Some(tracer) = &mut tracer {
                tracer.begin(op.named, stream)?;
            }
            for command in &op.commands {
                match command {
                    Command::Launch(i) => start(*i, op.lane)?,
                    Command::Exchange { label, sends, recvs } => {
                        let (sends, recvs) = (&self.messages[sends.clone()], &self.messages[recvs.clone()]);
                        // SAFETY: as of the launches: the transport's stream waits for all work on the memory that the
                        // exchange sends or overwrites, and readers of that memory wait for the transport's stream.
                        unsafe { transport.exchange(label.comparing(compared), sends, recvs) }?;
                    }
                }
            }
            if let Some(tracer) = &mut tracer {
                tracer.end(stream)?;
            }
            if let Some(event) = &op.event {
                event.record(stream)?;
            }
        }
        Ok(())
    }
}

/// Where the k rows of a rank lie in their documents; and the document of which it has the most, with their number.
fn held_documents(plan: &Plan, rank: usize) -> (HeldDocuments, (usize, u64)) {
    let mut counts = std::vec![0; plan.problem().batch().documents()];
    let mut runs = Vec::new();
    plan.local_tokens(Side::K, rank).for_each_run(|row, _, rows, document| {
        runs.push(HeldRows { row: row as u64, document: document as u32, first: counts[document] as u32 });
        counts[document] += rows as u64;
    });
    let longest = counts.into_iter().enumerate().max_by_key(|&(_, rows)| rows).unwrap_or((0, 0));
    (HeldDocuments::new(runs), longest)
}
