//! Transfers between threads of one process.
//!
//! A [`Channel`] joins a sender stage to a receiver stage in one direction. The sender *offers* a filled slot, the
//! receiver *posts* an empty one; the transfer happens when both are there, in the order of each side, by whoever comes
//! second. There is no buffer besides the slots, as the plan proved it (and as NCCL has it): what
//! runs here has no deadlock there.

use crate::arena::Slot;
use artifact::channel::{self, Freight};
use artifact::stream::Program;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// One side's slot of micro-batch (update, of a tied table) `mb`.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub mb: u64,
    pub slot: Slot,
}

/// The number of transfers after which one's own is done.
pub type Ticket = u64;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Channel {
    state: Mutex<State>,
    moved: Condvar,
    /// Transfers done; written under the lock.
    done: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    offers: VecDeque<End>,
    posts: VecDeque<End>,
    offered: u64,
    posted: u64,
}

impl Channel {
    /// A channel whose sender and receiver have at most so many slots each.
    pub fn new(slots: u32) -> Channel {
        let queue = || VecDeque::with_capacity(slots as usize);
        let state = State { offers: queue(), posts: queue(), offered: 0, posted: 0 };
        Channel { state: Mutex::new(state), ..Channel::default() }
    }

    /// The sender's slot is full: it must not be touched until the ticket is done.
    ///
    /// # Errors
    /// When the receiver expects another micro-batch.
    pub fn offer(&self, end: End) -> Result<Ticket, String> {
        let mut state = self.lock();
        state.offered += 1;
        let ticket = state.offered;
        match state.posts.pop_front() {
            Some(post) => self.complete(end, post)?,
            None => state.offers.push_back(end),
        }
        Ok(ticket)
    }

    /// The receiver's slot is empty: it must not be touched until the ticket is done.
    ///
    /// # Errors
    /// When the sender has another micro-batch.
    pub fn post(&self, end: End) -> Result<Ticket, String> {
        let mut state = self.lock();
        state.posted += 1;
        let ticket = state.posted;
        match state.offers.pop_front() {
            Some(offer) => self.complete(offer, end)?,
            None => state.posts.push_back(end),
        }
        Ok(ticket)
    }

    /// Copies; the caller holds the lock.
    fn complete(&self, offer: End, post: End) -> Result<(), String> {
        if offer.mb != post.mb {
            return Err(format!("micro-batch {} was sent where {} is expected", offer.mb, post.mb));
        }
        offer.slot.copy_to(post.slot);
        self.done.fetch_add(1, Ordering::Release);
        self.moved.notify_all();
        Ok(())
    }

    /// Whether the transfer of that ticket is done.
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.done.load(Ordering::Acquire) >= ticket
    }

    /// Blocks until the ticket is done (true) or the wait is pointless (false). Whoever makes `pointless` true calls
    /// [`Channel::wake`] after it.
    pub fn wait(&self, ticket: Ticket, spins: u32, pointless: impl Fn() -> bool) -> bool {
        for _ in 0..spins {
            if self.is_done(ticket) {
                return true;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        while !self.is_done(ticket) {
            if pointless() {
                return false;
            }
            state = self.moved.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        true
    }

    /// Makes every waiting thread look again.
    pub fn wake(&self) {
        let _state = self.lock();
        self.moved.notify_all();
    }

    /// Ready for the next segment: tickets count from 0 again. Posts that nothing came for are withdrawn. True when no offer was left behind.
    pub fn reset(&mut self) -> bool {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let clean = state.offers.is_empty();
        state.offers.clear();
        state.posts.clear();
        (state.offered, state.posted) = (0, 0);
        *self.done.get_mut() = 0;
        clean
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The channels of a pipeline, by their numbers: see [`artifact::channel`].
#[derive(Debug, Default)]
pub struct Links(pub Vec<Channel>);

impl Links {
    /// Channels as large as the stages' rings need.
    pub fn new(program: &Program) -> Links {
        let slots = |c: &channel::Channel| {
            let (from, to) = (&program.rings[c.from], &program.rings[c.to]);
            match c.freight {
                Freight::Activations => from.send_f.max(to.recv_f),
                Freight::Gradients => from.send_b.max(to.recv_b),
                Freight::Table | Freight::Norm | Freight::Total => 1,
            }
        };
        Links(channel::channels(program).iter().map(|c| Channel::new(slots(c))).collect())
    }

    pub fn all(&self) -> impl Iterator<Item = &Channel> {
        self.0.iter()
    }

    /// See [`Channel::reset`].
    pub fn reset(&mut self) -> bool {
        let left: Vec<bool> = self.0.iter_mut().map(Channel::reset).collect();
        left.into_iter().all(|clean| clean)
    }
}
