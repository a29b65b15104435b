//! Calls of NCCL. The library is opened by the name that its packages install, `libnccl.so.2`; nothing here panics without it.
//!
//! # Why they are sound
//!
//! The functions have the types of `nccl.h`, which `cudarc` has transcribed; the library stays open as long as the process. A communicator is
//! used by its owner only, on one thread at a time, and is destroyed once.

use cudarc::nccl::sys;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const UNIQUE_ID_BYTES: usize = 128;

/// What the ranks of a communicator have in common: made by one, sent to all.
pub type UniqueId = [u8; UNIQUE_ID_BYTES];

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// A value of the configuration that NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// NCCL 2.28.0, whose configuration this is; older libraries read the part that they know.
const CONFIG_VERSION: u32 = 22800;
/// Pause between looks at a call in progress.
const LOOK: Duration = Duration::from_micros(50);

/// `ncclCodet`, of which a later library may have more than this one knows.
type Code = c_int;
const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;

type RawComm = sys::ncclComm_t;
type Transfer = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;

/// The library's functions.
pub struct Nccl {
    version: unsafe extern "C" fn(*mut c_int) -> Code,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Code,
    init: unsafe extern "C" fn(*mut RawComm, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> Code,
    async_error: unsafe extern "C" fn(RawComm, *mut Code) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    group_start: unsafe extern "C" fn() -> Code,
    group_end: unsafe extern "C" fn() -> Code,
    send: Transfer,
    receive: Transfer,
    finalize: unsafe extern "C" fn(RawComm) -> Code,
    destroy: unsafe extern "C" fn(RawComm) -> Code,
    abort: unsafe extern "C" fn(RawComm) -> Code,
    _library: Library,
}

impl Nccl {
    /// Opens the library.
    ///
    /// # Errors
    /// Where it was looked for.
    pub fn load() -> Result<Nccl, String> {
        // SAFETY: NCCL's initialisers do nothing that a process must be ready for.
        let library = NAMES.iter().find_map(|&name| unsafe { Library::new(name) }.ok());
        let library = library.ok_or_else(|| {
            format!(
                "NCCL was not found (looked for {}); install it or add its folder to LD_LIBRARY_PATH",
                NAMES.join(" and ")
            )
        })?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of `nccl.h`.
                *unsafe { library.get($name) }
                    .map_err(|_| format!("the NCCL that was found has no {}", String::from_utf8_lossy($name)))?
            };
        }
        Ok(Nccl {
            version: function!(b"ncclGetVersion"),
            unique_id: function!(b"ncclGetUniqueId"),
            init: function!(b"ncclCommInitRankConfig"),
            async_error: function!(b"ncclCommGetAsyncError"),
            error_string: function!(b"ncclGetErrorString"),
            last_error: function!(b"ncclGetLastError"),
            group_start: function!(b"ncclGroupStart"),
            group_end: function!(b"ncclGroupEnd"),
            send: function!(b"ncclSend"),
            receive: function!(b"ncclRecv"),
            finalize: function!(b"ncclCommFinalize"),
            destroy: function!(b"ncclCommDestroy"),
            abort: function!(b"ncclCommAbort"),
            _library: library,
        })
    }

    /// As NCCL numbers its versions, e.g. 22803.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: writes one int.
        unsafe { (self.version)(&raw mut version) };
        version
    }

    /// A new communicator's id.
    ///
    /// # Errors
    /// In NCCL's words.
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = [0; UNIQUE_ID_BYTES];
        // SAFETY: the id has the size of `ncclUniqueId`.
        let made = unsafe { (self.unique_id)(&raw mut id) };
        if made == SUCCESS { Ok(id) } else { Err(self.words(made, null_mut())) }
    }

    /// An error in NCCL's words, with the last thing that went wrong.
    fn words(&self, error: Code, comm: RawComm) -> String {
        // SAFETY: both give strings that live as long as the library, or nothing.
        let text = |start: *const c_char| {
            (!start.is_null()).then(|| unsafe { CStr::from_ptr(start) }.to_string_lossy().trim().to_string())
        };
        let what = text(unsafe { (self.error_string)(error) }).unwrap_or_else(|| "an unknown error".into());
        let last = text(unsafe { (self.last_error)(comm) }).filter(|last| !last.is_empty());
        last.map_or_else(|| format!("NCCL: {what}"), |last| format!("NCCL: {what} ({last})"))
    }
}

/// A communicator of all ranks, as one of them has it.
pub struct Comm {
    nccl: Arc<Nccl>,
    comm: RawComm,
    aborted: bool,
}

// SAFETY: NCCL asks that calls of one communicator don't overlap; its owner has them on one thread at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Joins the communicator of `ranks` ranks. The GPU's context must be the thread's. All ranks join within the deadline.
    ///
    /// # Errors
    /// In words.
    pub fn join(nccl: Arc<Nccl>, id: UniqueId, rank: u32, ranks: u32, deadline: Duration) -> Result<Comm, String> {
        // SAFETY: plain data; zero is a value of every field. The id has the size of NCCL's.
        let (mut config, raw_id) = unsafe {
            let config = std::mem::MaybeUninit::<sys::ncclConfig_t>::zeroed().assume_init();
            (config, std::mem::transmute::<UniqueId, sys::ncclUniqueId>(id))
        };
        config.size = size_of::<sys::ncclConfig_t>();
        (config.magic, config.version, config.blocking) = (CONFIG_MAGIC, CONFIG_VERSION, 0);
        for field in [
            &mut config.cgaClusterSize,
            &mut config.minCTAs,
            &mut config.maxCTAs,
            &mut config.splitShare,
            &mut config.trafficClass,
            &mut config.collnetEnable,
            &mut config.CTAPolicy,
            &mut config.shrinkShare,
            &mut config.nvlsCTAs,
            &mut config.nChannelsPerNetPeer,
            &mut config.nvlinkCentricSched,
        ] {
            *field = UNDEFINED;
        }
        let mut comm = null_mut();
        // SAFETY: the configuration says its own size.
        let begun = unsafe { (nccl.init)(&raw mut comm, ranks as c_int, raw_id, rank as c_int, &raw mut config) };
        let joined = Comm { nccl, comm, aborted: false };
        joined.settle(begun, deadline).map_err(|what| format!("joining the other ranks: {what}"))?;
        Ok(joined)
    }

    /// Enqueues transfers as one group: (whether it sends, peer, address, bytes). Returns when they are enqueued.
    ///
    /// # Errors
    /// In words.
    pub fn exchange(
        &self,
        moves: &[(bool, u32, u64, u64)],
        stream: *mut c_void,
        deadline: Duration,
    ) -> Result<(), String> {
        // SAFETY: addresses of checked places in arenas that outlive the stream's work.
        let ended = unsafe {
            let mut first = (self.nccl.group_start)();
            for &(sends, peer, address, bytes) in moves {
                let call = if sends { self.nccl.send } else { self.nccl.receive };
                let done = call(address as *mut c_void, bytes as usize, BYTES, peer as c_int, self.comm, stream);
                let fine = matches!(done, SUCCESS | IN_PROGRESS);
                first = if fine { first } else { done };
            }
            let ended = (self.nccl.group_end)();
            if first == SUCCESS { ended } else { first }
        };
        self.settle(ended, deadline)
    }

    /// Whether all is well; NCCL's words when it is not.
    ///
    /// # Errors
    /// What happened, here or at a peer.
    pub fn check(&self) -> Result<(), String> {
        match self.state()? {
            SUCCESS | IN_PROGRESS => Ok(()),
            error => Err(self.nccl.words(error, self.comm)),
        }
    }

    fn state(&self) -> Result<Code, String> {
        let mut state = SUCCESS;
        // SAFETY: writes one value.
        let asked = unsafe { (self.nccl.async_error)(self.comm, &raw mut state) };
        if asked == SUCCESS { Ok(state) } else { Err(self.nccl.words(asked, self.comm)) }
    }

    /// Waits for a call that may still be in progress.
    fn settle(&self, mut result: Code, deadline: Duration) -> Result<(), String> {
        let start = Instant::now();
        while result == IN_PROGRESS {
            if start.elapsed() >= deadline {
                return Err(format!("NCCL was not done after {} s", deadline.as_secs_f64()));
            }
            std::thread::sleep(LOOK);
            result = self.state()?;
        }
        if result == SUCCESS { Ok(()) } else { Err(self.nccl.words(result, self.comm)) }
    }

    /// Ends all transfers at once.
    pub fn abort(&mut self) {
        if !self.aborted && !self.comm.is_null() {
            // SAFETY: aborted once, and not used after.
            unsafe { (self.nccl.abort)(self.comm) };
        }
        self.aborted = true;
    }

    /// Leaves in peace: all ranks do.
    pub fn leave(mut self, deadline: Duration) {
        if self.aborted || self.comm.is_null() {
            return;
        }
        // SAFETY: finalised, then destroyed once.
        let done = unsafe { (self.nccl.finalize)(self.comm) };
        if self.settle(done, deadline).is_ok() {
            unsafe { (self.nccl.destroy)(self.comm) };
            self.aborted = true;
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}
