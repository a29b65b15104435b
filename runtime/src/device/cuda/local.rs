//! Transfers between ranks of one GPU: copies inside its memory, ordered by events across the ranks' streams.
//!
//! A host puts its sends of an exchange on the board, takes those that it receives, and waits for its peers to have taken its own.
//! It enqueues exchanges in the order that all ranks share, so each host that waits here waits for one that is still on its way.

use artifact::ids::RankId;
use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a host sleeps before it looks whether the run has failed.
const LOOK: Duration = Duration::from_millis(20);

/// What a sender offers: where its slot is, its size, and the event after which it is full.
#[derive(Clone, Copy, Debug)]
pub struct Offer<E> {
    pub address: u64,
    pub bytes: u64,
    pub full: E,
}

/// The board of all ranks of a process. `E` is an event.
#[derive(Debug)]
pub struct Board<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    offers: HashMap<usize, VecDeque<Offer<E>>>,
    taken: HashMap<usize, VecDeque<E>>,
    /// The first rank that gave up.
    gone: Option<RankId>,
}

/// The run has failed on another rank, or a peer did not come in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    Gone(RankId),
    Late,
}

impl<E: Copy> Board<E> {
    pub fn new() -> Board<E> {
        let state = State { offers: HashMap::new(), taken: HashMap::new(), gone: None };
        Board { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Puts a send on a channel's board.
    pub fn offer(&self, channel: usize, offer: Offer<E>) {
        self.lock().offers.entry(channel).or_default().push_back(offer);
        self.changed.notify_all();
    }

    /// The next send of a channel.
    ///
    /// # Errors
    /// [`Lost`], when it doesn't come.
    pub fn take(&self, channel: usize, deadline: Duration) -> Result<Offer<E>, Lost> {
        self.until(deadline, |s| s.offers.get_mut(&channel)?.pop_front())
    }

    /// The last send that was taken of a channel has been copied when this event happens.
    pub fn taken(&self, channel: usize, copied: E) {
        self.lock().taken.entry(channel).or_default().push_back(copied);
        self.changed.notify_all();
    }

    /// The event after which the rank's next send of a channel has been copied.
    ///
    /// # Errors
    /// As above.
    pub fn copied(&self, channel: usize, deadline: Duration) -> Result<E, Lost> {
        self.until(deadline, |s| s.taken.get_mut(&channel)?.pop_front())
    }

    /// A rank gives up: nobody waits any more.
    pub fn leave(&self, rank: RankId) {
        self.lock().gone.get_or_insert(rank);
        self.changed.notify_all();
    }

    fn until<T>(&self, deadline: Duration, mut found: impl FnMut(&mut State<E>) -> Option<T>) -> Result<T, Lost> {
        let mut state = self.lock();
        let mut waited = Duration::ZERO;
        loop {
            if let Some(found) = found(&mut state) {
                return Ok(found);
            }
            if let Some(rank) = state.gone {
                return Err(Lost::Gone(rank));
            }
            if waited >= deadline {
                return Err(Lost::Late);
            }
            let woken = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            waited += if woken.1.timed_out() { LOOK } else { Duration::ZERO };
            state = woken.0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn both_directions_meet_and_keep_their_order() {
        let board = Board::new();
        std::thread::scope(|scope| {
            for (mine, theirs) in [(0, 1), (1, 0)] {
                let board = &board;
                scope.spawn(move || {
                    for i in 0..100 {
                        board.offer(mine, Offer { address: i, bytes: 4, full: i });
                        let offer = board.take(theirs, SOON).unwrap();
                        assert_eq!((offer.address, offer.full), (i, i));
                        board.taken(theirs, 1000 + i);
                        assert_eq!(board.copied(mine, SOON), Ok(1000 + i));
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_ends_every_wait_and_one_that_does_not_come_is_late() {
        let board = Board::<u32>::new();
        assert_eq!(board.copied(3, Duration::ZERO), Err(Lost::Late));
        board.leave(RankId(2));
        board.leave(RankId(1));
        assert!(matches!(board.take(0, SOON), Err(Lost::Gone(RankId(2)))));
    }
}
