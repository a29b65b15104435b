//! What the processes of a run tell each other outside of the devices: values by name, and that one of them has ended.
//!
//! The process of rank 0 listens; every process, that one too, has two connections to it. On the first it puts and gets values; a get waits
//! until someone has put. The second carries nothing until a rank fails or its process ends without having said goodbye: then it brings the reason to all.
//!
//! Messages are lengths (u32, little-endian) and bytes. Names and values are trusted as far as the network is: it is a cluster's own.

use artifact::ids::RankId;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long rank 0, whose process holds the store, stays for the others when all is done or it has failed itself.
const STAYS: Duration = Duration::from_secs(10);

/// Pause between attempts to reach rank 0, which may start later.
const AGAIN: Duration = Duration::from_millis(50);

const PUT: u8 = 0;
const GET: u8 = 1;
const FAIL: u8 = 2;
const GOODBYE: u8 = 3;

/// A process's connections.
#[derive(Debug)]
pub struct Store {
    rank: RankId,
    requests: Mutex<TcpStream>,
    failure: Arc<Mutex<Option<String>>>,
    /// Rank 0: what is stored, here.
    shared: Option<Arc<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    values: HashMap<String, Vec<u8>>,
    /// Processes that said goodbye.
    left: u32,
    /// Processes that hear of a failure, and those that have been told of it.
    listening: u32,
    told: u32,
    /// The first reason why the run can't go on.
    failure: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, what: String) {
        self.lock().failure.get_or_insert(what);
        self.changed.notify_all();
    }

    /// Waits for a while until the state is as wanted.
    fn stay(&self, wanted: impl Fn(&State) -> bool) {
        let late = self.changed.wait_timeout_while(self.lock(), STAYS, |s| !wanted(s));
        drop(late.unwrap_or_else(PoisonError::into_inner));
    }

    /// The state once it is as wanted, or has failed.
    fn until(&self, wanted: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.lock();
        self.changed.wait_while(state, |s| s.failure.is_none() && !wanted(s)).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Joins the processes that meet at an address; rank 0 listens there.
    ///
    /// # Errors
    /// One sentence: the address can't be listened at, or nobody answers within the deadline.
    pub fn join(host: &str, port: u16, rank: RankId, deadline: Duration) -> Result<Store, String> {
        let shared = if rank.0 == 0 {
            let listener = TcpListener::bind(("0.0.0.0", port))
                .map_err(|e| format!("rank 0 can't listen at port {port} ({e}); set MASTER_PORT to a free one"))?;
            Some(serve(listener))
        } else {
            None
        };
        let host = if rank.0 == 0 { "127.0.0.1" } else { host };
        let start = Instant::now();
        let reach = || -> io::Result<TcpStream> {
            loop {
                let address = (host, port).to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
                match TcpStream::connect(address) {
                    Ok(stream) => return Ok(stream),
                    Err(error) if start.elapsed() >= deadline => return Err(error),
                    Err(_) => std::thread::sleep(AGAIN),
                }
            }
        };
        let connect = || -> io::Result<Store> {
            let (mut requests, mut news) = (reach()?, reach()?);
            requests.set_nodelay(true)?;
            requests.write_all(&[[1], [0]].concat())?;
            requests.write_all(&rank.0.to_le_bytes())?;
            news.write_all(&[0, 0])?;
            news.write_all(&rank.0.to_le_bytes())?;
            let failure = Arc::new(Mutex::new(None));
            let heard = failure.clone();
            std::thread::spawn(move || {
                let said = receive(&mut news).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
                let what = said.unwrap_or_else(|_| "the process of rank 0 is gone".into());
                *heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
            });
            Ok(Store { rank, requests: Mutex::new(requests), failure, shared })
        };
        connect().map_err(|e| format!("rank {rank} can't reach rank 0 at {host}:{port} ({e})"))
    }

    /// Puts a value under a name.
    ///
    /// # Errors
    /// When rank 0 is gone.
    pub fn put(&self, name: &str, value: &[u8]) -> Result<(), String> {
        self.ask(PUT, name, value).map(|_| ())
    }

    /// The value of a name, once it is there.
    ///
    /// # Errors
    /// Why the run has failed meanwhile.
    pub fn get(&self, name: &str) -> Result<Vec<u8>, String> {
        let answer = self.ask(GET, name, &[])?;
        let (kind, value) = answer.split_first().unwrap_or((&0, &[]));
        if *kind == 1 { Ok(value.to_vec()) } else { Err(String::from_utf8_lossy(value).into_owned()) }
    }

    /// Tells all that this rank has failed.
    pub fn fail(&self, what: &str) {
        // Who can't be told is gone already.
        let _ = self.ask(FAIL, "", what.as_bytes());
        if let Some(shared) = &self.shared {
            shared.stay(|s| s.told >= s.listening);
        }
    }

    /// Says goodbye, when all of so many ranks have done what there was to do: a process that ends otherwise has failed.
    /// Rank 0 stays until all have.
    pub fn leave(&self, ranks: u32) {
        // Nothing is needed of the others any more.
        let _ = self.ask(GOODBYE, "", &[]);
        if let Some(shared) = &self.shared {
            shared.stay(|s| s.left >= ranks || s.failure.is_some());
        }
    }

    /// Why the run has failed, if it has.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn ask(&self, kind: u8, name: &str, value: &[u8]) -> Result<Vec<u8>, String> {
        let mut stream = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = stream.write_all(&[kind]).and_then(|()| send(&mut *stream, name.as_bytes()));
        let asked = asked.and_then(|()| send(&mut *stream, value)).and_then(|()| receive(&mut *stream));
        asked.map_err(|e| self.failure().unwrap_or_else(|| format!("rank {} lost rank 0 ({e})", self.rank)))
    }
}

fn send(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(bytes)
}

fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    // Grows with what comes, not with what is announced.
    let (mut bytes, length) = (Vec::new(), u32::from_le_bytes(length));
    stream.take(length.into()).read_to_end(&mut bytes)?;
    if bytes.len() == length as usize { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Answers connections for the rest of the process.
fn serve(listener: TcpListener) -> Arc<Shared> {
    let shared = Arc::new(Shared::default());
    let served = shared.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let shared = served.clone();
            std::thread::spawn(move || {
                // A connection that breaks is found out below, or is nobody's.
                let _ = attend(stream, &shared);
            });
        }
    });
    shared
}

fn attend(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut hello = [0; 6];
    stream.read_exact(&mut hello)?;
    let rank = u32::from_le_bytes([hello[2], hello[3], hello[4], hello[5]]);
    if hello[0] == 0 {
        shared.lock().listening += 1;
        let failure = shared.until(|_| false).failure.clone();
        let sent = send(&mut stream, failure.unwrap_or_default().as_bytes());
        shared.lock().told += 1;
        shared.changed.notify_all();
        return sent;
    }
    let said_goodbye = requests(&mut stream, shared);
    if !matches!(said_goodbye, Ok(true)) {
        shared.fail(format!("the process of rank {rank} is gone"));
    }
    Ok(())
}

/// Answers a rank until it says goodbye (true) or its connection ends.
fn requests(stream: &mut TcpStream, shared: &Shared) -> io::Result<bool> {
    loop {
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        let name = String::from_utf8_lossy(&receive(stream)?).into_owned();
        let value = receive(stream)?;
        let answer = match kind[0] {
            PUT => {
                shared.lock().values.insert(name, value);
                shared.changed.notify_all();
                Vec::new()
            }
            GET => {
                let state = shared.until(|s| s.values.contains_key(&name));
                match (state.values.get(&name), &state.failure) {
                    (Some(value), _) => [&[1], &value[..]].concat(),
                    (None, failure) => [&[0], failure.as_deref().unwrap_or_default().as_bytes()].concat(),
                }
            }
            FAIL => {
                shared.fail(String::from_utf8_lossy(&value).into_owned());
                Vec::new()
            }
            _ => {
                shared.lock().left += 1;
                shared.changed.notify_all();
                // Who leaves may not wait for the answer.
                let _ = send(stream, &[]);
                return Ok(true);
            }
        };
        send(stream, &answer)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    /// A port that is free now.
    fn port() -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.local_addr().unwrap().port()
    }

    fn join(port: u16, rank: u32) -> Store {
        Store::join("127.0.0.1", port, RankId(rank), SOON).unwrap()
    }

    #[test]
    fn values_reach_ranks_that_come_before_and_after() {
        let port = port();
        std::thread::scope(|scope| {
            // May come before anyone listens.
            let early = scope.spawn(move || {
                let store = join(port, 1);
                let value = store.get("id").unwrap();
                store.leave(3);
                value
            });
            let first = join(port, 0);
            first.put("id", &[7; 300]).unwrap();
            assert_eq!(early.join().unwrap(), [7; 300]);
            let late = join(port, 2);
            assert_eq!(late.get("id").unwrap(), [7; 300]);
            late.leave(3);
        });
    }

    #[test]
    fn rank_0_stays_until_all_have_left() {
        let port = port();
        let (first, other) = (join(port, 0), join(port, 1));
        std::thread::scope(|scope| {
            let leaves = scope.spawn(|| {
                first.leave(2);
                first.shared.as_ref().unwrap().lock().left
            });
            other.put("last", &[1]).unwrap();
            assert_eq!(other.get("last").unwrap(), [1]);
            other.leave(2);
            assert_eq!(leaves.join().unwrap(), 2);
        });
        assert_eq!(first.failure(), None, "who says goodbye has not failed");
    }

    #[test]
    fn a_process_that_ends_before_its_run_is_missed() {
        let port = port();
        let stays = join(port, 0);
        drop(join(port, 1));
        assert_eq!(stays.get("never").unwrap_err(), "the process of rank 1 is gone");
    }

    #[test]
    fn a_failure_reaches_all_and_ends_their_waits() {
        let port = port();
        let stores = [0, 1, 2].map(|rank| join(port, rank));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| stores[2].get("never").unwrap_err());
            stores[1].fail("rank 1 has no memory");
            assert_eq!(waits.join().unwrap(), "rank 1 has no memory");
        });
        while stores[0].failure().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(stores[0].failure().as_deref(), Some("rank 1 has no memory"));
    }

    #[test]
    fn a_process_that_ends_without_a_word_is_missed() {
        let port = port();
        let stays = join(port, 0);
        let ends = join(port, 3);
        ends.requests.lock().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(stays.get("never").unwrap_err(), "the process of rank 3 is gone");
    }

    #[test]
    fn who_is_not_there_is_told() {
        let error = Store::join("127.0.0.1", port(), RankId(1), Duration::ZERO).unwrap_err();
        assert!(error.starts_with("rank 1 can't reach rank 0 at 127.0.0.1:"), "{error}");
    }
}
