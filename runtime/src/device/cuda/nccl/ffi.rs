//! Calls of NCCL. The library is opened by the name that its packages install, `libnccl.so.2`; nothing here panics without it.
//!
//! # Why they are sound
//!
//! The functions have the types of `nccl.h`, which `cudarc` has transcribed; the library stays open as long as the process. A communicator is
//! used by its owner only, on one thread at a time, and is destroyed once.

use crate::device::Fault;
use crate::device::cuda::patience::Patience;
use cudarc::nccl::sys;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

pub const UNIQUE_ID_BYTES: usize = 128;

/// What the ranks of a communicator have in common: made by one, sent to all.
pub type UniqueId = [u8; UNIQUE_ID_BYTES];

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// A value of the configuration that NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// NCCL 2.28.0, whose configuration this is; older libraries read the part that they know.
const CONFIG_VERSION: u32 = 22800;

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
    patience: Patience,
    aborted: bool,
}

// SAFETY: NCCL asks that calls of one communicator don't overlap; its owner has them on one thread at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Joins the communicator of `ranks` ranks. The GPU's context must be the thread's. All ranks join within the deadline; no call of the communicator
    /// is waited for longer than that, or after the run has failed elsewhere.
    ///
    /// # Errors
    /// In words.
    pub fn join(nccl: Arc<Nccl>, id: UniqueId, rank: u32, ranks: u32, patience: Patience) -> Result<Comm, Fault> {
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
        let joined = Comm { nccl, comm, patience, aborted: false };
        match joined.settle(begun) {
            Ok(()) => Ok(joined),
            Err(Fault::Device(what)) => Err(Fault::Device(format!("joining the other ranks: {what}"))),
            Err(fault) => Err(fault),
        }
    }

    /// Enqueues transfers as one group: (whether it sends, peer, address, bytes). Returns when they are enqueued.
    ///
    /// # Errors
    /// In words.
    pub fn exchange(&self, moves: &[(bool, u32, u64, u64)], stream: *mut c_void) -> Result<(), Fault> {
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
        self.settle(ended)
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
    fn settle(&self, begun: Code) -> Result<(), Fault> {
        let mut state = Some(begun);
        self.patience.until("NCCL was not done", || match state.take().map_or_else(|| self.state(), Ok)? {
            SUCCESS => Ok(Some(())),
            IN_PROGRESS => Ok(None),
            error => Err(self.nccl.words(error, self.comm)),
        })
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
    pub fn leave(mut self) {
        if self.aborted || self.comm.is_null() {
            return;
        }
        // SAFETY: finalised, then destroyed once.
        let done = unsafe { (self.nccl.finalize)(self.comm) };
        if self.settle(done).is_ok() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::patience;
    use artifact::ids::RankId;
    use std::sync::atomic::{AtomicI32, Ordering};
    use std::time::Duration;

    /// What the library that never loads says of its calls in progress.
    static STATE: AtomicI32 = AtomicI32::new(IN_PROGRESS);

    unsafe extern "C" fn version(_: *mut c_int) -> Code {
        SUCCESS
    }
    unsafe extern "C" fn unique_id(_: *mut UniqueId) -> Code {
        SUCCESS
    }
    unsafe extern "C" fn init(
        _: *mut RawComm,
        _: c_int,
        _: sys::ncclUniqueId,
        _: c_int,
        _: *mut sys::ncclConfig_t,
    ) -> Code {
        IN_PROGRESS
    }
    unsafe extern "C" fn async_error(_: RawComm, state: *mut Code) -> Code {
        // SAFETY: the caller gives a place for one value.
        unsafe { *state = STATE.load(Ordering::Relaxed) };
        SUCCESS
    }
    unsafe extern "C" fn error_string(_: Code) -> *const c_char {
        c"it broke".as_ptr()
    }
    unsafe extern "C" fn last_error(_: RawComm) -> *const c_char {
        c"".as_ptr()
    }
    unsafe extern "C" fn group() -> Code {
        SUCCESS
    }
    unsafe extern "C" fn transfer(_: *mut c_void, _: usize, _: c_int, _: c_int, _: RawComm, _: *mut c_void) -> Code {
        IN_PROGRESS
    }
    unsafe extern "C" fn end(_: RawComm) -> Code {
        SUCCESS
    }

    /// A library whose calls begin and don't end while nobody sets the state.
    fn slow() -> Arc<Nccl> {
        Arc::new(Nccl {
            version,
            unique_id,
            init,
            async_error,
            error_string,
            last_error,
            group_start: group,
            group_end: group,
            send: transfer,
            receive: transfer,
            finalize: end,
            destroy: end,
            abort: end,
            _library: libloading::os::unix::Library::this().into(),
        })
    }

    /// In one test: the state is all calls'.
    #[test]
    fn calls_in_progress_end_with_their_result_the_deadline_or_the_failure_of_another_process() {
        let join = |patience| Comm::join(slow(), [0; UNIQUE_ID_BYTES], 0, 2, patience).map(|_| ());
        let [stays, goes] = patience::tests::two();
        std::thread::scope(|scope| {
            let joins = scope.spawn(|| join(stays.clone()));
            drop(goes);
            assert_eq!(joins.join().unwrap(), Err(Fault::Peer(RankId(0), "the process of rank 1 is gone".into())));
        });
        let brief = Patience::new(Duration::ZERO, None);
        let late = "joining the other ranks: NCCL was not done after 0 s";
        assert_eq!(join(brief), Err(Fault::Device(late.into())));
        STATE.store(1, Ordering::Relaxed);
        let patient = Patience::new(Duration::from_secs(60), None);
        assert_eq!(join(patient.clone()), Err(Fault::Device("joining the other ranks: NCCL: it broke".into())));
        STATE.store(SUCCESS, Ordering::Relaxed);
        assert_eq!(join(patient), Ok(()));
    }
}
