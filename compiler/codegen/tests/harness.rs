//! Compiles a kernel through the whole path, runs it, and compares with f64 references.

use crate::call::{Buffer, Code};
use artifact::ids::StageId;
use codegen::context::CodegenContext;
use codegen::kernels::{self, KernelSource};
use codegen::{cuda, image, pipeline};
use emulated::{Launch, Memory, Module, Operand, Order};
use model::kernel::{Kernel, KernelOp};
use model::kernel_plan::plan_kernel;
use model::operands::Access;
use model::target::{Chip, CpuClass, Target};
use std::cell::{Cell, RefCell};

/// An operand's content.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    F32(Vec<f32>),
    F64(Vec<f64>),
    U32(Vec<u32>),
    /// By their bits.
    Bf16(Vec<u16>),
}

impl Data {
    /// Content of an output: the kernel must overwrite all of it.
    pub fn unset(len: usize) -> Self {
        Data::F32(vec![f32::NAN; len])
    }

    pub fn f32(&self) -> &[f32] {
        let Data::F32(v) = self else { panic!("not f32: {self:?}") };
        v
    }

    pub fn f64(&self) -> &[f64] {
        let Data::F64(v) = self else { panic!("not f64: {self:?}") };
        v
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Data::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::F64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::U32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// The same kind of data, read from bytes.
    fn read(&self, bytes: &[u8]) -> Self {
        fn each<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
            bytes.chunks_exact(N).map(|c| from(c.try_into().expect("a chunk of N"))).collect()
        }
        match self {
            Data::F32(_) => Data::F32(each(bytes, f32::from_le_bytes)),
            Data::F64(_) => Data::F64(each(bytes, f64::from_le_bytes)),
            Data::U32(_) => Data::U32(each(bytes, u32::from_le_bytes)),
            Data::Bf16(_) => Data::Bf16(each(bytes, u16::from_le_bytes)),
        }
    }
}

thread_local! {
    static CONTEXT: RefCell<Option<CodegenContext>> = const { RefCell::new(None) };
}

/// Runs something with this thread's context.
pub fn with_context<T>(f: impl FnOnce(&CodegenContext) -> T) -> T {
    CONTEXT.with(|slot| {
        let mut slot = slot.borrow_mut();
        f(slot.get_or_insert_with(|| CodegenContext::new().unwrap_or_else(|e| panic!("{e}"))))
    })
}

/// The CPU classes that this machine can run.
pub fn runnable() -> Vec<CpuClass> {
    let mut classes = Vec::new();
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("bmi2") {
        classes.push(CpuClass::X86V3);
    }
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
    {
        classes.push(CpuClass::X86V4);
    }
    classes
}

/// The CPU classes that this machine can run, and a GPU in the emulator.
pub fn targets() -> Vec<Target> {
    runnable().into_iter().map(Target::Cpu).chain([Target::Emulated]).collect()
}

/// A compiled kernel, ready to be called.
pub struct Runnable {
    pub kernel: Kernel,
    /// In which a device's threads run.
    pub order: Order,
    code: Compiled,
}

enum Compiled {
    Image(Code, u64),
    Device(Module, Vec<cuda::Launch>),
}

impl Runnable {
    pub fn new(op: KernelOp, target: impl Into<Target>) -> Self {
        let target = target.into();
        Self::of(plan_kernel(op, target), target)
    }

    pub fn of(kernel: Kernel, target: impl Into<Target>) -> Self {
        match target.into() {
            Target::Cpu(cpu) => {
                let source = kernels::source(&kernel, cpu);
                Self::of_source(kernel, source, cpu)
            }
            Target::Cuda(chip) => Self::of_device(kernel, chip),
            Target::Emulated => Self::of_device(kernel, Chip::Sm80),
        }
    }

    fn of_device(kernel: Kernel, chip: Chip) -> Self {
        let device = cuda::device_kernel(&kernel).unwrap_or_else(|e| panic!("{e}"));
        let object = with_context(|c| cuda::emulated_object(c, &device.name, &device.module(), chip));
        let module = Module::load(&object.unwrap_or_else(|e| panic!("{e}"))).unwrap_or_else(|e| panic!("{e}"));
        Self { kernel, order: Order::Random(1), code: Compiled::Device(module, device.launches) }
    }

    /// A source of the test's own, with the operands and the scratch of `kernel`.
    pub fn of_source(kernel: Kernel, source: KernelSource, cpu: CpuClass) -> Self {
        let object =
            with_context(|c| pipeline::compile_source(c, &kernel, source, cpu)).unwrap_or_else(|e| panic!("{e}"));
        let image = image::link(StageId(0), &[(0, &object)]).unwrap_or_else(|e| panic!("{e}"));
        let code = Compiled::Image(Code::map(&image.code), image.exports[0].1);
        Self { kernel, order: Order::Ascending, code }
    }

    /// Calls the kernel; gives all operands as they are afterwards.
    ///
    /// # Panics
    ///
    /// When operands have wrong sizes, the kernel writes outside of them, or it changes one that it may only read.
    pub fn call(&self, data: &[Data]) -> Vec<Data> {
        let expected = self.kernel.operands();
        assert_eq!(data.len(), expected.len(), "number of operands of {}", self.kernel.name);
        let mut buffers = data.iter().map(|d| Buffer::new(&d.bytes())).collect::<Vec<_>>();
        for (i, (buffer, operand)) in buffers.iter_mut().zip(&expected).enumerate() {
            assert_eq!(buffer.data().len() as u64, operand.bytes, "bytes of operand {i} of {}", self.kernel.name);
        }
        if self.kernel.scratch_bytes > 0 {
            // Not zero: a kernel must not rely on what scratch holds.
            buffers.push(Buffer::new(&vec![0xFF; self.kernel.scratch_bytes as usize]));
        }
        self.execute(&mut buffers);
        let after = data.iter().zip(&mut buffers).map(|(d, b)| d.read(b.data())).collect::<Vec<_>>();
        for (i, operand) in expected.iter().enumerate() {
            if operand.access == Access::Read {
                assert_eq!(after[i].bytes(), data[i].bytes(), "operand {i} of {} was changed", self.kernel.name);
            }
        }
        after
    }

    fn execute(&self, buffers: &mut [Buffer]) {
        let (module, launches) = match &self.code {
            Compiled::Image(code, offset) => return code.call(*offset, buffers),
            Compiled::Device(module, launches) => (module, launches),
        };
        let access = self.kernel.operands().into_iter().map(|o| o.access.reads()).chain([false]);
        let operands = buffers.iter_mut().zip(access);
        let operands = operands
            .map(|(b, initialised)| Operand { bytes: Cell::from_mut(b.data()).as_slice_of_cells(), initialised })
            .collect();
        let mut memory = Memory::new(operands);
        for launch in launches {
            let launch = Launch { entry: &launch.entry, grid: launch.grid, threads: launch.threads };
            let done = emulated::launch(module, &launch, &mut memory, self.order);
            done.unwrap_or_else(|fault| panic!("{fault}"));
        }
    }

    /// Seconds of one call, the smallest of `times`.
    #[allow(dead_code, reason = "the example `matmul_speed` uses it")]
    pub fn seconds(&self, data: &[Data], times: u32) -> f64 {
        let mut buffers = data.iter().map(|d| Buffer::new(&d.bytes())).collect::<Vec<_>>();
        if self.kernel.scratch_bytes > 0 {
            buffers.push(Buffer::new(&vec![0; self.kernel.scratch_bytes as usize]));
        }
        let once = |_| {
            let start = std::time::Instant::now();
            self.execute(&mut buffers);
            start.elapsed().as_secs_f64()
        };
        (0..times).map(once).fold(f64::INFINITY, f64::min)
    }
}

/// Compiles for `target`, calls once, gives all operands afterwards.
pub fn run(op: KernelOp, target: impl Into<Target>, data: &[Data]) -> Vec<Data> {
    Runnable::new(op, target).call(data)
}

/// Reproducible values in -1 .. 1 that differ by seed.
pub fn random(seed: u64, len: usize) -> Vec<f32> {
    let mix = |z: u64| {
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let base = mix(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1));
    (0..len as u64)
        .map(|i| {
            let bits = mix(base.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))) >> 40;
            (bits as f64 / f64::from(1 << 23) - 1.0) as f32
        })
        .collect()
}

/// Asserts that `found` is `expected` within `tolerance`, relative to the larger of 1 and the expected value's size. NaN fails.
pub fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*f) - e).abs() / e.abs().max(1.0);
        assert!(error <= tolerance, "{what}[{i}]: {f} instead of {e} (error {error:e}, allowed {tolerance:e})");
    }
}

/// Bits of f32 values, to be compared for equality.
pub fn bits(data: &Data) -> Vec<u32> {
    data.f32().iter().map(|x| x.to_bits()).collect()
}
