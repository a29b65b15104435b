//! Waiting for what other ranks have a part in: it ends in time, and at once when the run has failed elsewhere.

use crate::device::Fault;
use crate::member::Member;
use artifact::ids::RankId;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pause between looks.
const LOOK: Duration = Duration::from_micros(50);

/// How long a rank waits, and who tells it not to wait any longer.
#[derive(Clone)]
pub struct Patience {
    pub deadline: Duration,
    /// In a run of several processes: this one's part.
    pub member: Option<Arc<Member>>,
    /// The first rank of this process that failed, and how.
    failed: Arc<Mutex<Option<(RankId, String)>>>,
}

impl Patience {
    pub fn new(deadline: Duration, member: Option<Arc<Member>>) -> Patience {
        Patience { deadline, member, failed: Arc::default() }
    }

    /// Ends the waits of this process's other ranks.
    pub fn fail(&self, rank: RankId, what: String) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((rank, what));
    }

    /// Why nobody needs to wait any more, if so.
    fn failure(&self) -> Option<Fault> {
        let here = self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let elsewhere = || self.member.as_ref().and_then(|m| Some((m.rank, m.store.failure()?)));
        here.or_else(elsewhere).map(|(rank, what)| Fault::Peer(rank, what))
    }

    /// Asks until there is an answer.
    ///
    /// # Errors
    /// What the asking failed with; why another rank has failed, here or in another process; and that `what` (a sentence's start, as in `NCCL was
    /// not done`) was so until the deadline.
    pub fn until<T>(&self, what: &str, mut ask: impl FnMut() -> Result<Option<T>, String>) -> Result<T, Fault> {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask().map_err(Fault::Device)? {
                return Ok(answer);
            }
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if start.elapsed() >= self.deadline {
                return Err(Fault::Device(format!("{what} after {} s", self.deadline.as_secs_f64())));
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::store::Store;
    use std::net::TcpListener;

    /// Longer than any test runs.
    const NEVER: Duration = Duration::from_secs(100_000);

    /// Two processes of a run, by their patience.
    pub fn two() -> [Patience; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        [0, 1].map(|rank| {
            let store = Store::join("127.0.0.1", port, RankId(rank), Duration::from_secs(60)).unwrap();
            Patience::new(NEVER, Some(Arc::new(Member { rank: RankId(rank), local: rank, store })))
        })
    }

    #[test]
    fn an_answer_ends_the_wait_and_so_does_the_deadline() {
        let (mut asked, alone) = (0, Patience::new(NEVER, None));
        let third = || {
            asked += 1;
            Ok((asked == 3).then_some(asked))
        };
        assert_eq!(alone.until("it did not come", third), Ok(3));
        let words = alone.until("it did not come", || Err::<Option<()>, _>("it broke".into()));
        assert_eq!(words, Err(Fault::Device("it broke".into())));
        let brief = Patience::new(Duration::ZERO, None);
        let late = brief.until("it did not come", || Ok(None::<()>));
        assert_eq!(late, Err(Fault::Device("it did not come after 0 s".into())));
    }

    #[test]
    fn a_rank_that_fails_ends_the_waits_of_the_others_with_the_first_cause() {
        let waits = Patience::new(NEVER, None);
        let fails = waits.clone();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.until("it did not come", || Ok(None::<()>)));
            fails.fail(RankId(2), "rank 2 has no memory".into());
            fails.fail(RankId(1), "rank 1 gave up".into());
            assert_eq!(waiting.join().unwrap(), Err(Fault::Peer(RankId(2), "rank 2 has no memory".into())));
        });
    }

    #[test]
    fn a_process_that_is_gone_ends_the_wait_of_another() {
        let [stays, goes] = two();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| stays.until("it did not come", || Ok(None::<()>)));
            drop(goes);
            assert_eq!(waits.join().unwrap(), Err(Fault::Peer(RankId(0), "the process of rank 1 is gone".into())));
        });
    }
}
