//! Calls of the driver.
//!
//! # Why they are sound
//!
//! Handles come from the driver and live as long as what owns them here; each owner frees its own. Every call that needs a context makes its GPU's
//! the thread's first. What a stream does later, with memory of the arena, staging memory and marks, happens while the owner of these lives:
//! a [`Queue`] waits for its streams before anything is freed.

use crate::device::cuda::Ordinal;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::time::Duration;

/// A loaded and initialised driver.
#[derive(Clone, Copy, Debug)]
pub struct Driver(());

/// A GPU whose primary context is held.
#[derive(Debug)]
pub struct Gpu {
    pub ordinal: Ordinal,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the driver's handles may be used on any thread.
unsafe impl Send for Gpu {}
unsafe impl Sync for Gpu {}

/// A driver's error in its own words.
fn words(error: DriverError) -> String {
    let text = error.error_string().ok().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|| format!("CUDA error {:?}", error.0))
}

fn call<T>(what: &str, result: Result<T, DriverError>) -> Result<T, String> {
    result.map_err(|error| format!("{what} failed: {}", words(error)))
}

/// Waits for the default stream: its calls may return before the memory of the GPU has changed, and a queue's streams don't wait for it.
fn settled(what: &str) -> Result<(), String> {
    // SAFETY: a context is current, and none is the default stream's handle.
    call(what, unsafe { result::stream::synchronize(null_mut()) })
}

/// Whether an event's last record has happened.
fn ended(event: sys::CUevent) -> Result<bool, String> {
    // SAFETY: the owner of the event calls.
    match unsafe { result::event::query(event) } {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(words(error)),
    }
}

impl Driver {
    /// None where there is no driver's library.
    ///
    /// # Errors
    /// Why the driver does not start.
    pub fn load() -> Result<Option<Driver>, String> {
        // SAFETY: looks for the library and lets go of it.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        match result::init() {
            Ok(()) => Ok(Some(Driver(()))),
            // A driver without a GPU: the count says so.
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(Some(Driver(()))),
            Err(error) => Err(words(error)),
        }
    }

    /// GPUs that this process may use.
    pub fn count(self) -> u32 {
        result::device::get_count().map_or(0, |n| n.max(0) as u32)
    }

    /// A GPU by its number among those.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn gpu(self, ordinal: Ordinal) -> Result<Gpu, String> {
        let device = call("opening the GPU", result::device::get(ordinal as i32))?;
        // SAFETY: the device was just given by the driver.
        let context = call("making a context", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Gpu { ordinal, device, context })
    }
}

impl Gpu {
    pub fn name(&self) -> String {
        result::device::get_name(self.device).unwrap_or_else(|_| "an unnamed GPU".into())
    }

    /// Major and minor compute capability.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn capability(&self) -> Result<(u32, u32), String> {
        use sys::CUdevice_attribute_enum as A;
        let get = |attribute| {
            // SAFETY: the device is the driver's.
            let value = unsafe { result::device::get_attribute(self.device, attribute) };
            call("asking the GPU's compute capability", value).map(|n| n as u32)
        };
        let major = get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        Ok((major, get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
    }

    /// Multiprocessors that it has.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn multiprocessors(&self) -> Result<u32, String> {
        let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the device is the driver's.
        let value = unsafe { result::device::get_attribute(self.device, attribute) };
        call("asking the GPU's multiprocessors", value).map(|n| n as u32)
    }

    /// Free and total bytes.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn memory(&self) -> Result<(u64, u64), String> {
        self.enter()?;
        call("asking the GPU's memory", result::mem_get_info()).map(|(free, total)| (free as u64, total as u64))
    }

    /// Makes the GPU's context this thread's.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn enter(&self) -> Result<(), String> {
        // SAFETY: the context is held.
        call("entering the GPU's context", unsafe { result::ctx::set_current(self.context) })
    }

    /// Loads a module: PTX as text, or a cubin.
    ///
    /// # Errors
    /// What the driver's assembler says.
    pub fn load(&self, image: &[u8]) -> Result<Loaded, String> {
        self.enter()?;
        let mut text = image.to_vec();
        text.push(0);
        let mut log = vec![0u8; 4096];
        let mut options = [
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = null_mut();
        // SAFETY: the image ends with a zero byte; options and values have the length given, and the log's is true.
        let loaded = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        loaded.result().map_err(|error| {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let said = String::from_utf8_lossy(&log[..end]).trim().replace('\n', "; ");
            if said.is_empty() { words(error) } else { format!("{}: {said}", words(error)) }
        })?;
        Ok(Loaded { module, context: self.context })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: held since `Driver::gpu`. A failure at the end is nobody's concern.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A module on a GPU.
pub struct Loaded {
    module: sys::CUmodule,
    context: sys::CUcontext,
}

// SAFETY: as for `Gpu`.
unsafe impl Send for Loaded {}

/// A function of a [`Loaded`] module.
#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: as for `Gpu`.
unsafe impl Send for Function {}

impl Loaded {
    /// A function by name.
    ///
    /// # Errors
    /// When the module has none of that name.
    pub fn function(&self, name: &str) -> Result<Function, String> {
        let symbol = CString::new(name).map_err(|e| e.to_string())?;
        // SAFETY: the module is loaded.
        let found = unsafe { result::module::get_function(self.module, symbol) };
        call(&format!("finding the kernel `{name}`"), found).map(Function)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded in that context, and no stream runs its functions any more (see the module's text).
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::module::unload(self.module);
        }
    }
}

/// Memory of the host that the GPU reads and writes.
#[derive(Debug)]
pub struct Host {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the owner's memory; who touches which bytes when is ordered by events.
unsafe impl Send for Host {}

impl Host {
    fn new(bytes: usize) -> Result<Host, String> {
        let bytes = bytes.max(1);
        // SAFETY: a context is current; the memory is set before it is read.
        unsafe {
            let start = call("allocating host memory", result::malloc_host(bytes, 0))?.cast::<u8>();
            start.write_bytes(0, bytes);
            Ok(Host { start, bytes })
        }
    }

    /// Leaves it to the process's end: the GPU may still write there.
    fn abandon(&mut self) {
        (self.start, self.bytes) = (std::ptr::null_mut(), 0);
    }

    fn at(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at + bytes <= self.bytes, "inside the host memory");
        self.start.wrapping_add(at)
    }

    pub fn put(&self, at: usize, bytes: &[u8]) {
        // SAFETY: in bounds; no command in flight touches these bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(at, bytes.len()), bytes.len()) }
    }

    pub fn get(&self, at: usize, out: &mut [u8]) {
        // SAFETY: as in `put`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(at, out.len()), out.as_mut_ptr(), out.len()) }
    }

    /// A word that the GPU may be writing now.
    pub fn word(&self, i: usize) -> u32 {
        // SAFETY: in bounds and aligned; the GPU writes whole words.
        unsafe { self.at(4 * i, 4).cast::<u32>().read_volatile() }
    }

    pub fn set_word(&self, i: usize, value: u32) {
        // SAFETY: as above.
        unsafe { self.at(4 * i, 4).cast::<u32>().write_volatile(value) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !self.start.is_null() {
            // SAFETY: allocated in `new`.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// A rank's arena on a GPU, its two streams, events and graphs.
pub struct Queue {
    gpu: Gpu,
    arena: sys::CUdeviceptr,
    bytes: u64,
    streams: [sys::CUstream; 2],
    events: Vec<sys::CUevent>,
    graphs: Vec<sys::CUgraphExec>,
    pub staging: Host,
    pub marks: Host,
    /// The run has failed and what is enqueued may never end: nothing is waited for or freed, until the process ends.
    pub abandoned: bool,
}

// SAFETY: as for `Gpu`.
unsafe impl Send for Queue {}

impl Queue {
    /// An arena of `bytes` zeros, and room for the rest.
    ///
    /// # Errors
    /// In the driver's words.
    pub fn new(gpu: Gpu, bytes: u64, staging: usize, events: usize, marks: usize) -> Result<Queue, String> {
        gpu.enter()?;
        let stream = || call("making a stream", result::stream::create(result::stream::StreamKind::NonBlocking));
        let streams = [stream()?, stream()?];
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
        let event = |_| call("making an event", result::event::create(flags));
        let events = (0..events).map(event).collect::<Result<_, _>>()?;
        let (staging, marks) = (Host::new(staging)?, Host::new(4 * marks)?);
        // SAFETY: a context is current, and the memory is zeroed before anything reads it.
        let arena = unsafe {
            let arena = call("allocating the arena", result::malloc_sync(bytes as usize))?;
            call("clearing the arena", result::memset_d8_sync(arena, 0, bytes as usize))?;
            arena
        };
        settled("clearing the arena")?;
        Ok(Queue { gpu, arena, bytes, streams, events, graphs: Vec::new(), staging, marks, abandoned: false })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a stretch of the arena is on the device.
    pub fn address(&self, offset: u64, bytes: u64) -> u64 {
        assert!(offset + bytes <= self.bytes, "a checked place lies inside the arena");
        self.arena + offset
    }

    /// The handle of a stream, for NCCL.
    pub fn stream(&self, stream: usize) -> *mut c_void {
        self.streams[stream].cast()
    }

    /// The handle of an event, for another rank of the same GPU.
    pub fn event(&self, event: usize) -> EventHandle {
        EventHandle(self.events[event])
    }

    pub fn enter(&self) -> Result<(), String> {
        self.gpu.enter()
    }

    /// Copies to the arena, at once.
    ///
    /// # Errors
    /// In the driver's words; so for all of the below.
    pub fn upload(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.enter()?;
        let to = self.address(offset, bytes.len() as u64);
        // SAFETY: in bounds, and no stream uses the arena now.
        call("copying to the GPU", unsafe { result::memcpy_htod_sync(to, bytes) })?;
        settled("copying to the GPU")
    }

    pub fn download(&self, offset: u64, out: &mut [u8]) -> Result<(), String> {
        self.enter()?;
        let from = self.address(offset, out.len() as u64);
        // SAFETY: as in `upload`.
        call("copying from the GPU", unsafe { result::memcpy_dtoh_sync(out, from) })
    }

    pub fn copy_in(&self, from: usize, to: u64, bytes: usize) -> Result<(), String> {
        let (to, from) = (self.address(to, bytes as u64), self.staging.at(from, bytes));
        // SAFETY: both in bounds; the host leaves the staging memory alone until the part has ended.
        let done = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.streams[0]) };
        call("copying to the GPU", done.result())
    }

    pub fn copy_out(&self, from: u64, to: usize, bytes: usize) -> Result<(), String> {
        let (from, to) = (self.address(from, bytes as u64), self.staging.at(to, bytes));
        // SAFETY: as in `copy_in`.
        let done = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.streams[0]) };
        call("copying from the GPU", done.result())
    }

    /// A copy inside the GPU, from another rank's arena, among the transfers.
    pub fn copy_from(&self, from: u64, to: u64, bytes: u64) -> Result<(), String> {
        let to = self.address(to, bytes);
        // SAFETY: the peer gave an address inside its arena and waits for this copy's event.
        let done = unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.streams[1]) };
        call("copying between ranks", done)
    }

    pub fn launch(&self, function: Function, grid: [u32; 3], threads: u32, addresses: &[u64]) -> Result<(), String> {
        let mut params: Vec<*mut c_void> = addresses.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        let grid = (grid[0], grid[1], grid[2]);
        // SAFETY: a kernel of a checked bundle with as many operands as it takes, each a place of the arena; the driver copies them now.
        let done = unsafe { result::launch_kernel(function.0, grid, (threads, 1, 1), 0, self.streams[0], &mut params) };
        call("launching a kernel", done)
    }

    pub fn mark(&self, stream: usize, word: usize, value: u32) -> Result<(), String> {
        let word = self.marks.at(4 * word, 4) as sys::CUdeviceptr;
        // SAFETY: memory of the host that the driver gave has one address for both.
        let done = unsafe { sys::cuMemsetD32Async(word, value, 1, self.streams[stream]) };
        call("marking progress", done.result())
    }

    pub fn record(&self, stream: usize, event: usize) -> Result<(), String> {
        // SAFETY: both are this queue's.
        call("recording an event", unsafe { result::event::record(self.events[event], self.streams[stream]) })
    }

    pub fn wait(&self, stream: usize, event: usize) -> Result<(), String> {
        self.wait_for(stream, self.event(event))
    }

    pub fn wait_for(&self, stream: usize, event: EventHandle) -> Result<(), String> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is of this queue, or of a peer that outlives the segment.
        call("waiting for an event", unsafe { result::stream::wait_event(self.streams[stream], event.0, flags) })
    }

    /// Whether an event's last record has happened. A failed kernel or copy shows here.
    pub fn happened(&self, event: usize) -> Result<bool, String> {
        self.enter()?;
        ended(self.events[event])
    }

    /// Begins to measure the time of what is enqueued on the computations' stream from here on.
    pub fn timer(&self) -> Result<Timer, String> {
        let event = || call("making an event", result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT));
        let timer = Timer { start: event()?, end: event()? };
        // SAFETY: the event and the stream live.
        call("recording an event", unsafe { result::event::record(timer.start, self.streams[0]) })?;
        Ok(timer)
    }

    /// Measures no further.
    pub fn stop(&self, timer: &Timer) -> Result<(), String> {
        // SAFETY: the event and the stream live.
        call("recording an event", unsafe { result::event::record(timer.end, self.streams[0]) })
    }

    /// How long what was enqueued until [`Queue::stop`] took; none while it is not done.
    pub fn passed(&self, timer: &Timer) -> Result<Option<Duration>, String> {
        if !ended(timer.end)? {
            return Ok(None);
        }
        // SAFETY: both events live and have happened.
        let milliseconds = call("reading a time", unsafe { result::event::elapsed(timer.start, timer.end) })?;
        Ok(Some(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)))
    }

    /// What is enqueued from here on goes into a graph.
    pub fn begin_capture(&self) -> Result<(), String> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this queue's.
        call("beginning a graph", unsafe { result::stream::begin_capture(self.streams[0], mode) })
    }

    /// Ends it; the graph's number.
    pub fn end_capture(&mut self) -> Result<usize, String> {
        // SAFETY: the stream is being captured; the graph is freed when it has been made into one that runs.
        let made = unsafe {
            let graph = call("ending a graph", result::stream::end_capture(self.streams[0]))?;
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            call("making a graph", made)?
        };
        self.graphs.push(made);
        Ok(self.graphs.len() - 1)
    }

    pub fn launch_graph(&self, graph: usize) -> Result<(), String> {
        self.enter()?;
        // SAFETY: the graph is this queue's.
        call("launching a graph", unsafe { result::graph::launch(self.graphs[graph], self.streams[0]) })
    }
}

/// Two events that have times.
pub struct Timer {
    start: sys::CUevent,
    end: sys::CUevent,
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: made in `Queue::timer`; the driver frees them when nothing enqueued uses them any more.
        unsafe {
            let _ = result::event::destroy(self.start);
            let _ = result::event::destroy(self.end);
        }
    }
}

/// An event of a rank.
#[derive(Clone, Copy)]
pub struct EventHandle(sys::CUevent);

// SAFETY: as for `Gpu`.
unsafe impl Send for EventHandle {}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.abandoned {
            self.staging.abandon();
            self.marks.abandon();
            return;
        }
        // SAFETY: all are this queue's. What runs ends first; failures at the end are nobody's concern.
        unsafe {
            let _ = self.gpu.enter();
            for &stream in &self.streams {
                let _ = result::stream::synchronize(stream);
            }
            for &graph in &self.graphs {
                let _ = result::graph::exec_destroy(graph);
            }
            for &event in &self.events {
                let _ = result::event::destroy(event);
            }
            for &stream in &self.streams {
                let _ = result::stream::destroy(stream);
            }
            let _ = result::free_sync(self.arena);
        }
    }
}
