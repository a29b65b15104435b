//! Waiting for what other ranks have a part in: it ends in time, and at once when the run has failed elsewhere.

use crate::device::Fault;
use crate::member::Member;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between looks.
const LOOK: Duration = Duration::from_micros(50);

/// How long a rank waits, and who tells it not to wait any longer.
#[derive(Clone)]
pub struct Patience {
    pub deadline: Duration,
    /// In a run of several processes: this one's part.
    pub member: Option<Arc<Member>>,
}

impl Patience {
    /// Asks until there is an answer.
    ///
    /// # Errors
    /// What the asking failed with; why the run has failed, when that came from another process; and that `what` (a sentence's start, as in
    /// `NCCL was not done`) was so until the deadline.
    pub fn until<T>(&self, what: &str, mut ask: impl FnMut() -> Result<Option<T>, String>) -> Result<T, Fault> {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask().map_err(Fault::Device)? {
                return Ok(answer);
            }
            if let Some(member) = &self.member
                && let Some(failure) = member.store.failure()
            {
                return Err(Fault::Peer(member.rank, failure));
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
    use artifact::ids::RankId;
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
            Patience { deadline: NEVER, member: Some(Arc::new(Member { rank: RankId(rank), local: rank, store })) }
        })
    }

    #[test]
    fn an_answer_ends_the_wait_and_so_does_the_deadline() {
        let (mut asked, alone) = (0, Patience { deadline: NEVER, member: None });
        let third = || {
            asked += 1;
            Ok((asked == 3).then_some(asked))
        };
        assert_eq!(alone.until("it did not come", third), Ok(3));
        let words = alone.until("it did not come", || Err::<Option<()>, _>("it broke".into()));
        assert_eq!(words, Err(Fault::Device("it broke".into())));
        let brief = Patience { deadline: Duration::ZERO, member: None };
        let late = brief.until("it did not come", || Ok(None::<()>));
        assert_eq!(late, Err(Fault::Device("it did not come after 0 s".into())));
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
