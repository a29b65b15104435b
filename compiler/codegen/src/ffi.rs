//! LLVM through its C interface: the one file with `unsafe` code. mlir-sys links these symbols already.
//!
//! Each wrapper owns what it was given and frees it once; modules and target machines borrow the context they live in.

use melior::ir::{Attribute, AttributeLike, Module, OperationRef};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Once;

type Ptr = *mut c_void;

unsafe extern "C" {
    fn LLVMInitializeX86TargetInfo();
    fn LLVMInitializeX86Target();
    fn LLVMInitializeX86TargetMC();
    fn LLVMInitializeX86AsmPrinter();
    fn LLVMInitializeX86AsmParser();
    fn LLVMInitializeNVPTXTargetInfo();
    fn LLVMInitializeNVPTXTarget();
    fn LLVMInitializeNVPTXTargetMC();
    fn LLVMInitializeNVPTXAsmPrinter();
    fn LLVMCreateMemoryBufferWithMemoryRangeCopy(data: *const c_char, len: usize, name: *const c_char) -> Ptr;
    fn LLVMParseIRInContext(context: Ptr, buffer: Ptr, module: *mut Ptr, error: *mut *mut c_char) -> c_int;
    fn LLVMGetVersion(major: *mut c_uint, minor: *mut c_uint, patch: *mut c_uint);
    fn LLVMContextCreate() -> Ptr;
    fn LLVMContextDispose(context: Ptr);
    fn LLVMContextSetDiagnosticHandler(context: Ptr, handler: extern "C" fn(Ptr, Ptr), data: Ptr);
    fn LLVMGetDiagInfoDescription(info: Ptr) -> *mut c_char;
    fn LLVMGetDiagInfoSeverity(info: Ptr) -> c_int;
    fn LLVMDisposeMessage(message: *mut c_char);
    fn LLVMDisposeModule(module: Ptr);
    fn LLVMPrintModuleToString(module: Ptr) -> *mut c_char;
    fn LLVMSetTarget(module: Ptr, triple: *const c_char);
    fn LLVMSetModuleDataLayout(module: Ptr, layout: Ptr);
    fn LLVMCreateTargetDataLayout(machine: Ptr) -> Ptr;
    fn LLVMDisposeTargetData(layout: Ptr);
    fn LLVMGetTargetFromTriple(triple: *const c_char, target: *mut Ptr, error: *mut *mut c_char) -> c_int;
    fn LLVMCreateTargetMachine(
        target: Ptr,
        triple: *const c_char,
        cpu: *const c_char,
        features: *const c_char,
        level: c_int,
        relocation: c_int,
        model: c_int,
    ) -> Ptr;
    fn LLVMDisposeTargetMachine(machine: Ptr);
    fn LLVMTargetMachineEmitToMemoryBuffer(
        machine: Ptr,
        module: Ptr,
        kind: c_int,
        error: *mut *mut c_char,
        buffer: *mut Ptr,
    ) -> c_int;
    fn LLVMGetBufferStart(buffer: Ptr) -> *const c_char;
    fn LLVMGetBufferSize(buffer: Ptr) -> usize;
    fn LLVMDisposeMemoryBuffer(buffer: Ptr);
    fn LLVMCreatePassBuilderOptions() -> Ptr;
    fn LLVMDisposePassBuilderOptions(options: Ptr);
    fn LLVMRunPasses(module: Ptr, passes: *const c_char, machine: Ptr, options: Ptr) -> Ptr;
    fn LLVMGetErrorMessage(error: Ptr) -> *mut c_char;
    fn LLVMDisposeErrorMessage(message: *mut c_char);
}

const CPU_TRIPLE: &CStr = c"x86_64-unknown-linux-gnu";
const GPU_TRIPLE: &CStr = c"nvptx64-nvidia-cuda";
const CODEGEN_AGGRESSIVE: c_int = 3;
const RELOCATION_PIC: c_int = 2;
const CODE_MODEL_SMALL: c_int = 3;
const ASSEMBLY_FILE: c_int = 0;
const OBJECT_FILE: c_int = 1;
/// Diagnostics up to this severity (error 0, warning 1) count.
const SEVERITY_WARNING: c_int = 1;

/// LLVM's version, `22.1.8`.
pub fn llvm_version() -> String {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three valid places to write to.
    unsafe { LLVMGetVersion(&mut major, &mut minor, &mut patch) };
    format!("{major}.{minor}.{patch}")
}

/// Sets an attribute of an operation that is known by reference only, as MLIR's own rewriters do.
pub fn set_attribute<'c>(op: OperationRef<'c, '_>, name: &str, value: Attribute<'c>) {
    let name = mlir_sys::MlirStringRef { data: name.as_ptr() as *const c_char, length: name.len() };
    // SAFETY: operation and attribute are alive and of one context; the name is copied.
    unsafe { mlir_sys::mlirOperationSetAttributeByName(op.to_raw(), name, value.to_raw()) }
}

/// Takes over a C string that LLVM allocated.
fn take_message(message: *mut c_char) -> String {
    if message.is_null() {
        return String::new();
    }
    // SAFETY: LLVM gave a null-terminated string that is ours to free, once.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeMessage(message);
        text
    }
}

/// An LLVM context that collects its warnings and errors.
pub struct LlvmContext {
    raw: Ptr,
    /// Boxed: the handler holds its address.
    messages: Box<RefCell<String>>,
}

extern "C" fn collect(info: Ptr, data: Ptr) {
    // SAFETY: `data` is the RefCell that `LlvmContext` keeps alive as long as its context; `info` is valid during the call.
    unsafe {
        if LLVMGetDiagInfoSeverity(info) <= SEVERITY_WARNING {
            let text = take_message(LLVMGetDiagInfoDescription(info));
            let mut messages = (*(data as *const RefCell<String>)).borrow_mut();
            messages.push_str(&text);
            messages.push('\n');
        }
    }
}

impl LlvmContext {
    pub fn new() -> Self {
        let messages = Box::new(RefCell::new(String::new()));
        // SAFETY: the handler's data outlives the context: both are freed in `drop`, the context first.
        let raw = unsafe {
            let raw = LLVMContextCreate();
            LLVMContextSetDiagnosticHandler(raw, collect, &*messages as *const RefCell<String> as Ptr);
            raw
        };
        Self { raw, messages }
    }

    /// What was reported since the last call.
    pub fn take_messages(&self) -> String {
        self.messages.take()
    }

    /// Translates a module of the LLVM dialect; none if MLIR reported an error.
    pub fn translate(&self, module: &Module<'_>) -> Option<LlvmModule<'_>> {
        self.translate_operation(module.as_operation())
    }

    /// As [`LlvmContext::translate`], of any operation that is a module.
    pub fn translate_operation(&self, module: OperationRef<'_, '_>) -> Option<LlvmModule<'_>> {
        // SAFETY: both are alive; the result belongs to this context, which it borrows.
        let raw = unsafe { mlir_sys::mlirTranslateModuleToLLVMIR(module.to_raw(), self.raw as _) as Ptr };
        (!raw.is_null()).then_some(LlvmModule { raw, context: PhantomData })
    }

    /// Reads LLVM IR from text.
    pub fn parse(&self, text: &str) -> Result<LlvmModule<'_>, String> {
        let (mut raw, mut error) = (null_mut(), null_mut());
        // SAFETY: the text is copied into the buffer, which parsing takes over; the module belongs to this context.
        let failed = unsafe {
            let start = text.as_ptr() as *const c_char;
            let buffer = LLVMCreateMemoryBufferWithMemoryRangeCopy(start, text.len(), c"text".as_ptr());
            LLVMParseIRInContext(self.raw, buffer, &mut raw, &mut error) != 0
        };
        if failed { Err(take_message(error)) } else { Ok(LlvmModule { raw, context: PhantomData }) }
    }
}

impl Drop for LlvmContext {
    fn drop(&mut self) {
        // SAFETY: modules borrow the context, so none is left.
        unsafe { LLVMContextDispose(self.raw) }
    }
}

/// Code generator settings for one CPU or GPU.
pub struct TargetMachine {
    raw: Ptr,
    triple: &'static CStr,
}

impl TargetMachine {
    /// A generator of position-independent code of the small model.
    pub fn new(cpu: &str, features: &str) -> Result<Self, String> {
        static INITIALISE: Once = Once::new();
        // SAFETY: registration functions without arguments, called once.
        INITIALISE.call_once(|| unsafe {
            LLVMInitializeX86TargetInfo();
            LLVMInitializeX86Target();
            LLVMInitializeX86TargetMC();
            LLVMInitializeX86AsmPrinter();
            LLVMInitializeX86AsmParser();
        });
        Self::of(CPU_TRIPLE, cpu, features)
    }

    /// A generator of PTX. A chip and a PTX version that don't fit end the process.
    pub fn gpu(chip: &str, features: &str) -> Result<Self, String> {
        static INITIALISE: Once = Once::new();
        // SAFETY: as above.
        INITIALISE.call_once(|| unsafe {
            LLVMInitializeNVPTXTargetInfo();
            LLVMInitializeNVPTXTarget();
            LLVMInitializeNVPTXTargetMC();
            LLVMInitializeNVPTXAsmPrinter();
        });
        Self::of(GPU_TRIPLE, chip, features)
    }

    fn of(triple: &'static CStr, cpu: &str, features: &str) -> Result<Self, String> {
        let cpu = CString::new(cpu).map_err(|e| e.to_string())?;
        let features = CString::new(features).map_err(|e| e.to_string())?;
        let (mut target, mut error) = (null_mut(), null_mut());
        // SAFETY: valid strings and places; the strings are copied.
        let raw = unsafe {
            if LLVMGetTargetFromTriple(triple.as_ptr(), &mut target, &mut error) != 0 {
                return Err(take_message(error));
            }
            LLVMCreateTargetMachine(
                target,
                triple.as_ptr(),
                cpu.as_ptr(),
                features.as_ptr(),
                CODEGEN_AGGRESSIVE,
                RELOCATION_PIC,
                CODE_MODEL_SMALL,
            )
        };
        if raw.is_null() { Err("LLVM has no code generator for this target".into()) } else { Ok(Self { raw, triple }) }
    }
}

impl Drop for TargetMachine {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe { LLVMDisposeTargetMachine(self.raw) }
    }
}

/// A module of LLVM IR.
pub struct LlvmModule<'l> {
    raw: Ptr,
    context: PhantomData<&'l LlvmContext>,
}

impl LlvmModule<'_> {
    /// Sets triple and data layout.
    pub fn set_target(&self, machine: &TargetMachine) {
        // SAFETY: both are alive; the module copies the layout.
        unsafe {
            LLVMSetTarget(self.raw, machine.triple.as_ptr());
            let layout = LLVMCreateTargetDataLayout(machine.raw);
            LLVMSetModuleDataLayout(self.raw, layout);
            LLVMDisposeTargetData(layout);
        }
    }

    /// Runs a pass pipeline in `opt`'s notation.
    pub fn run_passes(&self, passes: &str, machine: &TargetMachine) -> Result<(), String> {
        let passes = CString::new(passes).map_err(|e| e.to_string())?;
        // SAFETY: all are alive during the call; an error is ours to free.
        unsafe {
            let options = LLVMCreatePassBuilderOptions();
            let error = LLVMRunPasses(self.raw, passes.as_ptr(), machine.raw, options);
            LLVMDisposePassBuilderOptions(options);
            if error.is_null() {
                return Ok(());
            }
            let message = LLVMGetErrorMessage(error);
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeErrorMessage(message);
            Err(text)
        }
    }

    /// The module as text.
    pub fn print(&self) -> String {
        // SAFETY: the module is alive.
        take_message(unsafe { LLVMPrintModuleToString(self.raw) })
    }

    /// An ELF object.
    pub fn emit_object(&self, machine: &TargetMachine) -> Result<Vec<u8>, String> {
        self.emit(machine, OBJECT_FILE)
    }

    /// Assembly text.
    pub fn emit_assembly(&self, machine: &TargetMachine) -> Result<String, String> {
        let bytes = self.emit(machine, ASSEMBLY_FILE)?;
        String::from_utf8(bytes).map_err(|e| e.to_string())
    }

    fn emit(&self, machine: &TargetMachine, kind: c_int) -> Result<Vec<u8>, String> {
        let (mut error, mut buffer) = (null_mut(), null_mut());
        // SAFETY: both are alive; the buffer's bytes are copied before it is freed.
        unsafe {
            if LLVMTargetMachineEmitToMemoryBuffer(machine.raw, self.raw, kind, &mut error, &mut buffer) != 0 {
                return Err(take_message(error));
            }
            let bytes =
                std::slice::from_raw_parts(LLVMGetBufferStart(buffer) as *const u8, LLVMGetBufferSize(buffer)).to_vec();
            LLVMDisposeMemoryBuffer(buffer);
            Ok(bytes)
        }
    }
}

impl Drop for LlvmModule<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `translate`, freed once, before its context.
        unsafe { LLVMDisposeModule(self.raw) }
    }
}
