//! Fibers, and what the machine code calls.
//!
//! While a fiber runs, the thread-local [`RUNNING`] points to the stage it runs on. The calls below are made by the fiber's code, so
//! on its stack; each takes the state, and gives it back before it lets another fiber run.

use crate::WARP;
use crate::block::{State, Status};
use crate::tensor::{self, ROW_BYTES, WORDS, Words};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::cell::{Cell, RefCell};
use std::ptr::null;

const STACK_BYTES: usize = 64 * 1024;

type Waiting = Yielder<(), ()>;

/// A fiber's stack.
pub struct Stack(DefaultStack);

impl Default for Stack {
    fn default() -> Self {
        Self(DefaultStack::new(STACK_BYTES).expect("memory for a fiber's stack"))
    }
}

/// A thread of a block; it has a coroutine until its stack is taken.
pub struct Fiber(Option<Coroutine<(), (), (), DefaultStack>>);

impl Fiber {
    /// Its stack, if it has ended.
    pub fn into_stack(mut self) -> Option<Stack> {
        self.0.take_if(|coroutine| coroutine.done()).map(|coroutine| Stack(coroutine.into_stack()))
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        if let Some(coroutine) = &mut self.0 {
            // SAFETY: a kernel's frames and those of the calls below hold nothing that would have to be dropped.
            unsafe { coroutine.force_reset() }
        }
    }
}

/// Where fibers run.
pub struct Stage<'m, 'a> {
    inner: Box<Inner<'m, 'a>>,
}

struct Inner<'m, 'a> {
    state: RefCell<State<'m, 'a>>,
    yielders: Vec<Cell<*const Waiting>>,
}

thread_local! {
    static RUNNING: Cell<*const Inner<'static, 'static>> = const { Cell::new(null()) };
}

impl<'m, 'a> Stage<'m, 'a> {
    pub fn new(state: State<'m, 'a>) -> Self {
        let yielders = vec![Cell::new(null()); state.statuses.len()];
        Self { inner: Box::new(Inner { state: RefCell::new(state), yielders }) }
    }

    pub fn with<T>(&mut self, f: impl FnOnce(&mut State<'m, 'a>) -> T) -> T {
        f(self.inner.state.get_mut())
    }

    /// A fiber of this stage that calls the kernel at `entry` with the operands' addresses, both of which must outlive it.
    pub fn fiber(&self, entry: usize, table: &[*mut u8], thread: usize, stack: Stack) -> Fiber {
        let (table, yielder) = (table.as_ptr(), &self.inner.yielders[thread] as *const Cell<*const Waiting>);
        Fiber(Some(Coroutine::with_stack(stack.0, move |waiting: &Waiting, ()| {
            // SAFETY: the launch keeps module, table and stage until its fibers are gone; the entry has this signature.
            unsafe {
                (*yielder).set(waiting);
                let kernel: extern "C" fn(*const *mut u8) = std::mem::transmute(entry);
                kernel(table);
            }
        })))
    }

    /// Runs a fiber until it waits or ends; true when it has ended.
    pub fn resume(&mut self, fiber: &mut Fiber) -> bool {
        let inner: *const Inner<'m, 'a> = &*self.inner;
        let coroutine = fiber.0.as_mut().expect("a fiber runs before its stack is taken");
        RUNNING.set(inner.cast());
        let result = coroutine.resume(());
        RUNNING.set(null());
        matches!(result, CoroutineResult::Return(()))
    }
}

/// Does something with the state of the stage that runs on this thread.
fn with<T>(f: impl FnOnce(&mut State) -> T) -> T {
    // SAFETY: only a fiber's code comes here, so `resume` has set the pointer and holds the stage; the borrow ends here.
    unsafe { f(&mut (*RUNNING.get()).state.borrow_mut()) }
}

/// Lets others run until the scheduler comes back.
fn wait() {
    // SAFETY: as above; the yielder is that of the fiber that runs, set before its code.
    unsafe {
        let inner = RUNNING.get();
        let current = (*inner).state.borrow().current;
        let yielder = (&(*inner).yielders)[current].get();
        (*yielder).suspend(());
    }
}

/// Ends the launch: a thread that did wrong runs no further.
fn refuse(result: Result<(), String>) {
    if let Err(wrong) = result {
        with(|state| state.wrong = Some(wrong));
        wait();
    }
}

/// A device's accesses are at multiples of their size.
fn aligned(address: usize, bytes: u32) -> Result<(), String> {
    if address.is_multiple_of(bytes as usize) {
        return Ok(());
    }
    Err(format!("accesses {bytes} bytes at an address that is not a multiple of {bytes}"))
}

extern "C" fn read(address: usize, bytes: u32) {
    refuse(aligned(address, bytes).and_then(|()| {
        with(|state| {
            if state.constants.contains(&address) {
                return Ok(());
            }
            state.memory.read(address, bytes as usize, state.number)
        })
    }));
}

extern "C" fn write(address: usize, bytes: u32) {
    refuse(
        aligned(address, bytes).and_then(|()| {
            with(|state| state.memory.write(address, bytes as usize, state.number, state.current as u32))
        }),
    );
}

extern "C" fn read_shared(address: usize, bytes: u32) {
    refuse(
        aligned(address, bytes)
            .and_then(|()| with(|state| state.shared.read(address, bytes as usize, state.current as u32))),
    );
}

extern "C" fn write_shared(address: usize, bytes: u32) {
    refuse(
        aligned(address, bytes)
            .and_then(|()| with(|state| state.shared.write(address, bytes as usize, state.current as u32))),
    );
}

extern "C" fn thread() -> u32 {
    with(|state| state.current as u32)
}

extern "C" fn block_x() -> u32 {
    with(|state| state.block[0])
}

extern "C" fn block_y() -> u32 {
    with(|state| state.block[1])
}

extern "C" fn block_z() -> u32 {
    with(|state| state.block[2])
}

extern "C" fn barrier(_number: u32, place: u32) {
    with(|state| state.statuses[state.current] = Status::Barrier(place));
    wait();
}

/// All lanes of the warp give something; then each does what it does with its number and all that was given.
fn meet_warp<T>(mask: u32, given: &[u32], place: u32, then: impl FnOnce(usize, &[Words]) -> T) -> T {
    if mask != u32::MAX {
        refuse(Err(format!("an exchange of some lanes only ({mask:#x})")));
    }
    with(|state| {
        state.given[state.current][..given.len()].copy_from_slice(given);
        state.statuses[state.current] = Status::Warp(place);
    });
    wait();
    with(|state| {
        let first = state.current / WARP * WARP;
        then(state.current - first, &state.delivered[first..first + WARP])
    })
}

extern "C" fn exchange(mask: u32, value: f32, distance: u32, _clamp: u32, place: u32) -> f32 {
    let given = [value.to_bits()];
    f32::from_bits(meet_warp(mask, &given, place, |lane, all| all[(lane ^ distance as usize) % WARP][0]))
}

extern "C" fn ballot(mask: u32, holds: u32, place: u32) -> u32 {
    let all = |_: usize, all: &[Words]| all.iter().rev().fold(0, |bits, lane| bits << 1 | lane[0]);
    meet_warp(mask, &[holds & 1], place, all)
}

extern "C" fn tf32(value: f32) -> u32 {
    tensor::tf32(value)
}

/// f32 to bf16, to nearest even: a call that the code generator makes of itself. A bf16 is returned where an f32 is, in its low half.
extern "C" fn truncate(value: f32) -> f32 {
    f32::from_bits(tensor::bf16(value).into())
}

/// A lane's part of a product on the tensor cores: it gives its registers and gets four.
fn product(given: *const u32, got: *mut u32, place: u32, of: fn(&[Words], usize) -> [u32; 4]) {
    // SAFETY: the code that the compiler adds for the instruction passes arrays of so many words.
    let (given, got) = unsafe { (&*given.cast::<[u32; WORDS]>(), &mut *got.cast::<[u32; 4]>()) };
    *got = meet_warp(u32::MAX, given, place, |lane, all| of(all, lane));
}

extern "C" fn mma_tf32(given: *const u32, got: *mut u32, place: u32) {
    product(given, got, place, tensor::mma_tf32);
}

extern "C" fn mma_bf16(given: *const u32, got: *mut u32, place: u32) {
    product(given, got, place, tensor::mma_bf16);
}

/// A lane gives the address of a row in shared memory; the row is read before any lane goes on.
fn matrices(given: *const u32, got: *mut u32, place: u32, transposed: bool) {
    // SAFETY: as above, the address being the first two words.
    let (&[low, high], got) = unsafe { (&*given.cast::<[u32; 2]>(), &mut *got.cast::<[u32; 4]>()) };
    let address = low as usize | (high as usize) << 32;
    read_shared(address, ROW_BYTES as u32);
    // SAFETY: the check found the whole row in shared memory.
    let row = unsafe { *(address as *const [u32; ROW_BYTES / 4]) };
    *got = meet_warp(u32::MAX, &row, place, |lane, rows| tensor::ldmatrix(rows, lane, transposed));
}

extern "C" fn ldmatrix(given: *const u32, got: *mut u32, place: u32) {
    matrices(given, got, place, false);
}

extern "C" fn ldmatrix_trans(given: *const u32, got: *mut u32, place: u32) {
    matrices(given, got, place, true);
}

/// The address of what a kernel's code calls.
pub fn address(name: &str) -> Option<u64> {
    let function = match name {
        "emu_read" => read as *const (),
        "emu_write" => write as *const (),
        "emu_read_shared" => read_shared as *const (),
        "emu_write_shared" => write_shared as *const (),
        "emu_thread" => thread as *const (),
        "emu_block_x" => block_x as *const (),
        "emu_block_y" => block_y as *const (),
        "emu_block_z" => block_z as *const (),
        "emu_barrier" => barrier as *const (),
        "emu_exchange" => exchange as *const (),
        "emu_ballot" => ballot as *const (),
        "emu_tf32" => tf32 as *const (),
        "__truncsfbf2" => truncate as *const (),
        "emu_mma_tf32" => mma_tf32 as *const (),
        "emu_mma_bf16" => mma_bf16 as *const (),
        "emu_ldmatrix" => ldmatrix as *const (),
        "emu_ldmatrix_trans" => ldmatrix_trans as *const (),
        _ => return None,
    };
    Some(function as u64)
}
