// SPDX-License-Identifier: MIT OR Apache-2.0
//! A case: a small kernel, what goes in, and what has to come out.
//!
//! The kernel has one buffer. Each input is a row of 64-bit slots, one a thread, then each output is, then there may be
//! memory that the kernel uses as it likes. A prologue loads the inputs into `$0`, `$1`, …, an epilogue stores `$d0`,
//! `$d1`, …; what stands between is the case's own. Nothing here knows the interpreter: the PTX is complete and runs on
//! a device as it is.
//!
//! Results are bits, save where PTX leaves freedom: a NaN's payload, and the error of an approximation.

/// How wide a register is. PTX lets an untyped register hold any type of its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ty {
    Pred,
    B16,
    B32,
    B64,
}

impl Ty {
    fn name(self) -> &'static str {
        match self {
            Ty::Pred => "pred",
            Ty::B16 => "b16",
            Ty::B32 => "b32",
            Ty::B64 => "b64",
        }
    }
}

/// A floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    F16,
    Bf16,
    F32,
    F64,
}

impl Float {
    /// What the bits stand for.
    pub fn value(self, bits: u64) -> f64 {
        // (exponent bits, fraction bits)
        let (e, m) = match self {
            Float::F16 => (5, 10),
            Float::Bf16 => (8, 7),
            Float::F32 => return f32::from_bits(bits as u32).into(),
            Float::F64 => return f64::from_bits(bits),
        };
        let (exponent, fraction) = ((bits >> m & ((1 << e) - 1)) as i32, (bits & ((1 << m) - 1)) as f64);
        let bias = (1 << (e - 1)) - 1;
        let size = match exponent {
            0 => fraction * 2f64.powi(1 - bias - m),
            x if x == (1 << e) - 1 && fraction == 0.0 => f64::INFINITY,
            x if x == (1 << e) - 1 => f64::NAN,
            x => (1.0 + fraction * 2f64.powi(-m)) * 2f64.powi(x - bias),
        };
        if bits >> (e + m) & 1 == 1 { -size } else { size }
    }
}

/// What a slot has to hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    Bits(u64),
    /// Any NaN.
    Nan(Float),
    /// A number, and how far from it the result may be.
    Near(Float, f64, f64),
}

impl Want {
    pub fn accepts(self, bits: u64) -> bool {
        match self {
            Want::Bits(b) => b == bits,
            Want::Nan(f) => f.value(bits).is_nan(),
            Want::Near(f, x, error) => (f.value(bits) - x).abs() <= error,
        }
    }
}

impl std::fmt::Display for Want {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Want::Bits(b) => write!(f, "{b:x}"),
            Want::Nan(_) => write!(f, "nan"),
            Want::Near(_, x, error) => write!(f, "{x:e}±{error:e}"),
        }
    }
}

impl From<u64> for Want {
    fn from(bits: u64) -> Self {
        Want::Bits(bits)
    }
}

/// A parameter beside the buffer's address.
#[derive(Clone, Debug)]
struct Extra {
    declaration: String,
    what: Given,
}

#[derive(Clone, Debug)]
enum Given {
    Bytes(Vec<u8>),
    Map(Map),
}

/// A tensor in the case's memory, and the box of it that copies move; dimensions from the innermost on. Codes are the
/// driver's.
#[derive(Clone, Debug)]
pub struct Map {
    /// 7 for f32, 1 for u16.
    pub element: u32,
    pub dims: Vec<u64>,
    /// In bytes, of all dimensions but the innermost.
    pub strides: Vec<u64>,
    pub shape: Vec<u32>,
    /// 0 for none, 1 to 3 for 32, 64 and 128 bytes.
    pub swizzle: u32,
    pub fill_nan: bool,
}

/// A kernel with its inputs and results.
#[derive(Clone, Debug)]
pub struct Case {
    pub family: &'static str,
    /// The instruction it is about.
    pub name: String,
    /// The architecture it needs: 80 or 90.
    pub sm: u32,
    /// It runs on that architecture and on no later one.
    pub specific: bool,
    pub blocks: u32,
    pub threads: u32,
    /// The first so many threads are all there is to see; the others repeat them.
    pub distinct: usize,
    extra: Vec<Extra>,
    module: String,
    /// Directives of the kernel.
    entry: String,
    body: String,
    inputs: Vec<(Ty, Vec<u64>)>,
    outputs: Vec<(Ty, Vec<Want>)>,
    memory: Vec<u8>,
    after: Vec<Want>,
}

/// A place that has to hold something, and what it holds.
pub struct Slot {
    pub place: String,
    pub want: Want,
    pub found: u64,
    /// The thread, for an output.
    thread: Option<usize>,
}

impl Case {
    /// A case of one block.
    pub fn new(family: &'static str, name: &str, threads: u32) -> Self {
        Self {
            family,
            name: name.to_owned(),
            sm: 80,
            specific: false,
            blocks: 1,
            threads,
            distinct: threads as usize,
            extra: Vec::new(),
            module: String::new(),
            entry: String::new(),
            body: String::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            memory: Vec::new(),
            after: Vec::new(),
        }
    }

    pub fn blocks(mut self, n: u32) -> Self {
        self.blocks = n;
        self.distinct = (n * self.threads) as usize;
        self
    }

    /// Needs a later architecture than 8.0.
    pub fn sm(mut self, sm: u32) -> Self {
        self.sm = sm;
        self
    }

    /// Needs what only `sm_90a` has.
    pub fn hopper(mut self) -> Self {
        (self.sm, self.specific) = (90, true);
        self
    }

    /// What stands before the kernel.
    pub fn module(mut self, text: &str) -> Self {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        self.module = lines.join("\n");
        self
    }

    /// What stands between the kernel's parameters and its body.
    pub fn entry(mut self, text: &str) -> Self {
        self.entry = text.to_owned();
        self
    }

    /// A parameter after the buffer.
    pub fn extra(mut self, declaration: &str, bytes: &[u8]) -> Self {
        self.extra.push(Extra { declaration: declaration.to_owned(), what: Given::Bytes(bytes.to_vec()) });
        self
    }

    /// A tensor map as a parameter after the buffer, of a tensor that begins where the case's memory does.
    pub fn map(mut self, name: &str, map: Map) -> Self {
        let declaration = format!(".param .align 64 .b8 {name}[128]");
        self.extra.push(Extra { declaration, what: Given::Map(map) });
        self
    }

    /// The parameters after the buffer, which lies at an address; maps are encoded by the runner of the case.
    pub fn parameters(
        &self,
        buffer: u64,
        mut encode: impl FnMut(&Map, u64) -> Result<[u8; 128], String>,
    ) -> Result<Vec<Vec<u8>>, String> {
        let bytes = |e: &Extra| match &e.what {
            Given::Bytes(b) => Ok(b.clone()),
            Given::Map(m) => encode(m, buffer + self.memory_at() as u64).map(|b| b.to_vec()),
        };
        self.extra.iter().map(bytes).collect()
    }

    /// The architecture it is written for, such as `sm_80`.
    pub fn target(&self) -> String {
        format!("sm_{}{}", self.sm, if self.specific { "a" } else { "" })
    }

    /// Whether a device of this compute capability can run it.
    pub fn runs_on(&self, sm: u32) -> bool {
        self.sm == sm || self.sm < sm && !self.specific
    }

    /// The next input, thread by thread.
    pub fn takes(mut self, ty: Ty, value: impl Fn(u64) -> u64) -> Self {
        self.inputs.push((ty, (0..u64::from(self.all())).map(value).collect()));
        self
    }

    /// The next output, thread by thread.
    pub fn gives<W: Into<Want>>(mut self, ty: Ty, value: impl Fn(u64) -> W) -> Self {
        self.outputs.push((ty, (0..u64::from(self.all())).map(|t| value(t).into()).collect()));
        self
    }

    /// Memory at `%mem`, before, and the words that are there in the end, from the first on.
    pub fn memory(mut self, before: Vec<u8>, after: Vec<Want>) -> Self {
        (self.memory, self.after) = (before, after);
        self
    }

    /// The instructions; `$0` is an input, `$d0` (or `$d`) an output, `%t` the thread, `%w<16>`, `%q<16>`, `%h<8>` and
    /// `%p<8>` are registers of 32, 64, 16 bits and predicates that may be used.
    pub fn body(mut self, text: &str) -> Self {
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        self.body = lines.join("\n");
        self
    }

    fn all(&self) -> u32 {
        self.blocks * self.threads
    }

    fn row(&self) -> usize {
        8 * self.all() as usize
    }

    fn memory_at(&self) -> usize {
        (self.row() * (self.inputs.len() + self.outputs.len())).next_multiple_of(256)
    }

    /// The module.
    pub fn ptx(&self) -> String {
        let (mut head, mut tail) = (String::new(), String::new());
        for (k, (ty, _)) in self.inputs.iter().enumerate() {
            let at = k * self.row();
            head += &format!(".reg .{} %a{k};\n", ty.name());
            if *ty == Ty::Pred {
                head += &format!("ld.global.b32 %w15, [%at+{at}];\nsetp.ne.b32 %a{k}, %w15, 0;\n");
            } else {
                head += &format!("ld.global.{} %a{k}, [%at+{at}];\n", ty.name());
            }
        }
        for (k, (ty, _)) in self.outputs.iter().enumerate() {
            let at = (self.inputs.len() + k) * self.row();
            head += &format!(".reg .{} %d{k};\n", ty.name());
            if *ty == Ty::Pred {
                tail += &format!("selp.b32 %w15, 1, 0, %d{k};\nst.global.b32 [%at+{at}], %w15;\n");
            } else {
                tail += &format!("st.global.{} [%at+{at}], %d{k};\n", ty.name());
            }
        }
        let mut body = self.body.clone();
        for k in (0..self.inputs.len()).rev() {
            body = body.replace(&format!("${k}"), &format!("%a{k}"));
        }
        for k in (0..self.outputs.len()).rev() {
            body = body.replace(&format!("$d{k}"), &format!("%d{k}"));
        }
        let body = body.replace("$d", "%d0");
        let extra: String = self.extra.iter().map(|e| format!(", {}", e.declaration)).collect();
        format!(
            ".version {}\n.target {}\n.address_size 64\n{}\n.visible .entry k(.param .u64 buffer{extra}){}\n{{\n\
             .reg .b32 %t, %w<16>;\n.reg .b64 %at, %mem, %q<16>;\n.reg .b16 %h<8>;\n.reg .pred %p<8>;\n\
             ld.param.u64 %at, [buffer];\ncvta.to.global.u64 %at, %at;\nadd.s64 %mem, %at, {};\n\
             mov.u32 %t, %ctaid.x;\nmov.u32 %w0, %ntid.x;\nmov.u32 %w1, %tid.x;\nmad.lo.u32 %t, %t, %w0, %w1;\n\
             mad.wide.u32 %at, %t, 8, %at;\n{head}{body}\n{tail}ret;\n}}\n",
            // Vectors of `red` came with PTX 8.1.
            if self.sm >= 90 { "8.1" } else { "8.0" },
            self.target(),
            self.module,
            if self.entry.is_empty() { String::new() } else { format!("\n{}", self.entry) },
            self.memory_at(),
        )
    }

    /// The buffer before the launch.
    pub fn buffer(&self) -> Vec<u8> {
        let mut out: Vec<u8> = self.inputs.iter().flat_map(|(_, v)| v).flat_map(|v| v.to_le_bytes()).collect();
        out.resize(self.memory_at(), 0);
        out.extend(&self.memory);
        out
    }

    /// Names the kernel and all it is given (FNV-1a, 64 bits).
    pub fn digest(&self) -> u64 {
        let extra = self.extra.iter().flat_map(|e| match &e.what {
            Given::Bytes(b) => b.clone(),
            Given::Map(m) => format!("{m:?}").into_bytes(),
        });
        let all = self.ptx().into_bytes().into_iter().chain(self.buffer()).chain(extra);
        all.fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
    }

    fn slots(&self, buffer: &[u8]) -> Vec<Slot> {
        let read = |at: usize, n: usize| buffer[at..at + n].iter().rev().fold(0, |v, &b| v << 8 | u64::from(b));
        let mut out = Vec::new();
        for (k, (_, wants)) in self.outputs.iter().enumerate() {
            for (t, &want) in wants.iter().enumerate() {
                let at = (self.inputs.len() + k) * self.row() + 8 * t;
                let place = format!("output {k} of thread {t}");
                out.push(Slot { place, want, found: read(at, 8), thread: Some(t) });
            }
        }
        for (k, &want) in self.after.iter().enumerate() {
            let at = self.memory_at() + 4 * k;
            out.push(Slot { place: format!("word {k} of memory"), want, found: read(at, 4), thread: None });
        }
        out
    }

    /// What the buffer holds, without the threads that repeat others.
    pub fn shown(&self, buffer: &[u8]) -> Vec<Slot> {
        self.slots(buffer).into_iter().filter(|s| s.thread.is_none_or(|t| t < self.distinct)).collect()
    }

    /// What is not as it has to be.
    pub fn judge(&self, buffer: &[u8]) -> Vec<Slot> {
        self.slots(buffer).into_iter().filter(|s| !s.want.accepts(s.found)).collect()
    }
}
