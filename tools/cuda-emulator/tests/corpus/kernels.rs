// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of the corpus and how they are launched: tensors in memory that nothing else has written, their maps,
//! parameters.

use cuda_emulator::{Kernel, Launch, Memory, Module, Mutant, Options, Report, Swizzle, TensorMap, launch};
use std::path::Path;

/// A line of `ptx/list`.
pub struct Entry {
    pub name: String,
    entry: String,
    shared: u32,
    pub tile: [usize; 3],
    pub brain: bool,
    maps: Vec<(Swizzle, Vec<u32>)>,
    pub text: String,
}

/// All of them.
pub fn all() -> Vec<Entry> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/ptx");
    let list = std::fs::read_to_string(folder.join("list")).unwrap();
    list.lines()
        .map(|line| {
            let words: Vec<&str> = line.split(" | ").collect();
            let tile: Vec<usize> = words[3].split(' ').map(|n| n.parse().unwrap()).collect();
            let map = |w: &&str| {
                let (width, shape) = w.split_once(':').unwrap();
                let code = [0, 32, 64, 128].iter().position(|x| *x == width.parse::<u32>().unwrap()).unwrap();
                // Outermost dimension first in the list, innermost first in a map.
                let shape = shape.rsplit('x').map(|n| n.parse().unwrap()).collect();
                (Swizzle::of(code as u32).unwrap(), shape)
            };
            Entry {
                name: words[0].to_owned(),
                entry: words[1].to_owned(),
                shared: words[2].parse().unwrap(),
                tile: tile.try_into().unwrap(),
                brain: words[4] == "bf16",
                maps: words[5..].iter().map(map).collect(),
                text: std::fs::read_to_string(folder.join(format!("{}.ptx", words[0]))).unwrap(),
            }
        })
        .collect()
}

/// A matrix in device memory: rows of `stride` elements, of which the first `columns` are its own. What lies between
/// and behind them was never written.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub at: u64,
    pub rows: usize,
    pub columns: usize,
    pub stride: usize,
    /// Bytes of an element.
    pub element: usize,
}

impl Matrix {
    /// With room for a few rows more than it has; not written.
    pub fn new(mem: &mut Memory, rows: usize, columns: usize, element: usize) -> Self {
        let stride = columns + 16 / element;
        Self { at: mem.alloc((rows + 3) * stride * element), rows, columns, stride, element }
    }

    /// Writes its elements: bits by row and column.
    pub fn fill(&self, mem: &mut Memory, bits: impl Fn(usize, usize) -> u32) {
        for r in 0..self.rows {
            for c in 0..self.columns {
                let v = bits(r, c).to_le_bytes();
                let at = self.at + ((r * self.stride + c) * self.element) as u64;
                mem.write(at, &v[..self.element]).unwrap();
            }
        }
    }

    /// Its elements' bits, row by row. What is not its own must still be as it was.
    pub fn read(&self, mem: &mut Memory) -> Vec<u32> {
        let bytes = mem.read(self.at, (self.rows + 3) * self.stride * self.element).unwrap();
        let mut out = Vec::with_capacity(self.rows * self.columns);
        for (k, e) in bytes.chunks_exact(self.element).enumerate() {
            if k / self.stride < self.rows && k % self.stride < self.columns {
                out.push(e.iter().rev().fold(0, |v, &b| v << 8 | u32::from(b)));
            } else {
                assert!(e.iter().all(|b| *b == 0xff), "element {k} is outside of the matrix, and was written");
            }
        }
        out
    }

    fn map(&self) -> TensorMap {
        TensorMap {
            element: self.element as u32,
            f32: self.element == 4,
            address: self.at,
            dims: vec![self.columns as u64, self.rows as u64],
            strides: vec![(self.stride * self.element) as u64],
            shape: Vec::new(),
            swizzle: Swizzle::None,
            fill_nan: false,
        }
    }
}

/// A parameter.
pub enum Arg {
    Tensor(Matrix),
    /// A tensor by its own map; box and swizzle come from the list.
    Map(TensorMap),
    Int(i32),
    Float(f32),
    Pointer(u64),
}

impl Entry {
    /// Runs it. The arguments are those of its source; what the compiler adds to them is added here.
    pub fn run(
        &self,
        mem: &mut Memory,
        change: Option<&Mutant>,
        grid: [u32; 3],
        args: &[Arg],
        options: Options,
    ) -> Result<(), Box<Report>> {
        let loaded =
            Module::parse(&self.text).and_then(|m| m.load(mem)).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let kernel = loaded.kernel(&self.entry).unwrap();
        let kernel = &change.map_or_else(|| kernel.clone(), |m| kernel.mutated(m));
        let params = self.params(kernel, args);
        let how = Launch {
            grid,
            block: kernel.required_threads().unwrap(),
            cluster: [1; 3],
            dynamic_shared: self.shared,
            params: &params,
            options,
        };
        launch(kernel, mem, &how).map(|_| ())
    }

    /// Its mutants, each with the text of its line.
    pub fn mutants(&self) -> Vec<(Mutant, String)> {
        let loaded = Module::parse(&self.text).and_then(|m| m.load(&mut Memory::new())).unwrap();
        let kernel = loaded.kernel(&self.entry).unwrap();
        kernel.mutants().into_iter().map(|m| (m, kernel.text(m.line).to_owned())).collect()
    }

    fn params(&self, kernel: &Kernel, args: &[Arg]) -> Vec<u8> {
        let mut words: Vec<Vec<u8>> = Vec::new();
        let mut maps = self.maps.iter();
        for arg in args {
            let map = match arg {
                Arg::Tensor(m) => m.map(),
                Arg::Map(m) => m.clone(),
                Arg::Int(v) => {
                    words.push(v.to_le_bytes().to_vec());
                    continue;
                }
                Arg::Float(v) => {
                    words.push(v.to_le_bytes().to_vec());
                    continue;
                }
                Arg::Pointer(v) => {
                    words.push(v.to_le_bytes().to_vec());
                    continue;
                }
            };
            let (swizzle, shape) = maps.next().unwrap().clone();
            let map = TensorMap { swizzle, shape, ..map };
            map.check().unwrap_or_else(|e| panic!("{}: {e}", self.name));
            words.push(map.encode().to_vec());
            words.extend(map.dims.iter().rev().map(|d| (*d as u32).to_le_bytes().to_vec()));
            let element = u64::from(map.element);
            words.extend(map.strides.iter().rev().map(|s| (s / element).to_le_bytes().to_vec()));
            words.push(1u64.to_le_bytes().to_vec());
        }
        words.extend([vec![0; 8], vec![0; 8]]);
        assert_eq!(words.len(), kernel.params().len(), "{}", self.name);
        let mut out = vec![0; kernel.param_bytes()];
        for (p, word) in kernel.params().iter().zip(words) {
            assert_eq!(p.size, word.len(), "{}: {}", self.name, p.name);
            out[p.offset..p.offset + p.size].copy_from_slice(&word);
        }
        out
    }
}
