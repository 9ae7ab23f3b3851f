// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves programs and tools of this kernel: one datagram for each message, a bounded number of clients, and a deadline
//! for each client (B-15).

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, oneshot},
    time::timeout,
};
use tombolo_control::{Envelope, Fault, Message, Name, VERSION, code};
use tombolo_os::lock::lock;

use crate::{
    discard,
    endpoint::program::{self, may_be_admitted},
    fd_passing,
    host::{
        async_fd::{accept, watch},
        event::{Event, Question},
        share::rest_after,
    },
};

/// Largest number of clients at a time, besides those of root and the broker's own user.
const CLIENTS_MAX: usize = 64;
/// Time that a client may take to say Hello, and to read an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time that a refused client may take to read the answer.
const LINGER: Duration = Duration::from_secs(1);
/// Time for which a client may say nothing.
const IDLE: Duration = Duration::from_secs(600);

/// Serves clients for as long as the broker receives events.
pub async fn serve(listener: AsyncFd<OwnedFd>, host: Name, events: mpsc::Sender<Event>) {
    let (seats, turns) = (Seats::default(), QuestionLocks::default());
    loop {
        let Ok(client) = accept(&listener).await else {
            // No descriptor is available, or the client has disconnected. The next attempt, a little later, may
            // succeed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(user) = fd_passing::user_of(&client) else { continue };
        let Some(seat) = seats.take_seat(user) else {
            turn_away(client, code::QUOTA, format!("user {user} has too many connections: close some"));
            continue;
        };
        let (host, events, turn) = (host.clone(), events.clone(), turns.of(user));
        tokio::spawn(async move {
            let _ = serve_client(client, user, &host, (&events, turn)).await;
            drop(seat);
        });
    }
}

/// A client's socket, which is closed without waiting. It is empty after it was handed over.
struct Client(Option<AsyncFd<OwnedFd>>);

impl Client {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        // A socket that cannot be watched is closed in the same way.
        let copy = socket.try_clone();
        watch(socket)
            .map(|socket| Self(Some(socket)))
            .inspect_err(|_| copy.iter().for_each(|copy| discard::end(copy.as_fd())))
    }

    fn socket(&self) -> &AsyncFd<OwnedFd> {
        self.0.as_ref().expect("who hands a client over uses it no more")
    }

    /// Returns the socket, for another owner to continue with.
    fn hand_over(mut self) -> OwnedFd {
        self.0.take().expect("a client is handed over once").into_inner()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            discard::end(socket.as_fd());
        }
    }
}

/// Number of clients of each user.
#[derive(Clone, Default)]
struct Seats(Arc<Mutex<BTreeMap<u32, usize>>>);

/// A client's place among those of its user, given back when dropped.
struct Seat(Seats, u32);

impl Seats {
    /// Returns a seat for a client of `user`, if there is one. Other users cannot keep an administrator out.
    fn take_seat(&self, user: u32) -> Option<Seat> {
        let own = rustix::process::geteuid().as_raw();
        let rules = |user: u32| user == 0 || user == own;
        let mut taken = lock(&self.0);
        let others = taken.iter().filter(|(it, _)| **it != user && !rules(**it)).map(|(_, seats)| seats).sum();
        let mine = taken.entry(user).or_default();
        let own = *mine + discard::waiting_of(user);
        let room = if rules(user) { *mine < CLIENTS_MAX } else { may_be_admitted(own, others, CLIENTS_MAX) };
        *mine += usize::from(room);
        room.then(|| Seat(self.clone(), user))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = lock(&self.0.0);
        if let Some(seats) = taken.get_mut(&self.1) {
            *seats -= 1;
        }
        taken.retain(|_, seats| *seats != 0);
    }
}

/// Lets each user ask one question at a time, with a pause after each. So no user has more than a share of the one
/// thread that answers (B-15). Root and the broker's own user may ask at any time.
#[derive(Clone, Default)]
struct QuestionLocks(Arc<Mutex<BTreeMap<u32, Weak<QuestionLock>>>>);

/// Held by an asker until the next asker of the same user may ask.
type QuestionLock = tokio::sync::Mutex<()>;

impl QuestionLocks {
    /// Returns the lock of a user. A user who may change everything needs none.
    fn of(&self, user: u32) -> Option<Arc<QuestionLock>> {
        if user == 0 || user == rustix::process::geteuid().as_raw() {
            return None;
        }
        let mut turns = lock(&self.0);
        turns.retain(|_, turn| turn.strong_count() != 0);
        let turn = turns.get(&user).and_then(Weak::upgrade).unwrap_or_default();
        turns.insert(user, Arc::downgrade(&turn));
        Some(turn)
    }
}

/// Tells a program that it is not served, and why. If many are turned away at once, the last ones are closed without an
/// answer, beginning with those of a user who has many.
pub fn turn_away(program: OwnedFd, code: u16, why: String) {
    static SEATS: OnceLock<Seats> = OnceLock::new();
    let Ok(program) = Client::new(program) else { return };
    let Ok(user) = fd_passing::user_of(program.socket()) else { return };
    let Some(seat) = SEATS.get_or_init(Seats::default).take_seat(user) else { return };
    tokio::spawn(async move {
        let (_seat, program) = (seat, program.socket());
        let said = timeout(PATIENCE, receive(program)).await;
        let serial = if let Ok(Ok(Ok(said))) = said { said.serial } else { 0 };
        let refuse = Message::Refuse { code, reason: why.into() };
        let _ = say_last(program, &Envelope { serial, message: refuse }).await;
    });
}

/// Sends a last message and shuts down the sending side. Then waits until the client has closed: if the socket closed
/// while messages of the client are unread, the client would lose the answer.
async fn say_last(client: &AsyncFd<OwnedFd>, said: &Envelope) -> io::Result<()> {
    send_message(client, said).await?;
    rustix::net::shutdown(client, rustix::net::Shutdown::Write)?;
    let gone = async { while receive(client).await.is_ok() {} };
    let _ = timeout(LINGER, gone).await;
    Ok(())
}

/// Serves one client until it disconnects or violates the protocol.
async fn serve_client(
    client: OwnedFd,
    user: u32,
    host: &Name,
    (events, turn): (&mpsc::Sender<Event>, Option<Arc<QuestionLock>>),
) -> io::Result<()> {
    let whole = Client::new(client)?;
    let client = whole.socket();
    let refuse =
        |serial, code, reason: &str| Envelope { serial, message: Message::Refuse { code, reason: reason.into() } };
    match timeout(PATIENCE, receive(client)).await?? {
        Ok(Envelope { message: Message::Hello { version_min, version_max, .. }, .. }) => {
            if version_min > VERSION || version_max < VERSION {
                return say_last(client, &refuse(0, code::VERSION, "this broker speaks version 1")).await;
            }
        }
        Ok(_) => return say_last(client, &refuse(0, code::MALFORMED, "Hello comes first")).await,
        Err(fault) => return say_last(client, &refuse(0, code::MALFORMED, &fault.to_string())).await,
    }
    let (epoch, boot, name) = (0, [0; 16], host.clone());
    let hello = Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name };
    send_message(client, &Envelope { serial: 0, message: hello }).await?;
    loop {
        let asked = match timeout(IDLE, receive(client)).await?? {
            Ok(asked) => asked,
            Err(fault) => return say_last(client, &refuse(0, code::MALFORMED, &fault.to_string())).await,
        };
        if let Message::Enter { account } = asked.message {
            if user != 0 && user != rustix::process::geteuid().as_raw() {
                let why = "only root and the broker's own user see all accounts";
                return say_last(client, &refuse(asked.serial, code::DENIED, why)).await;
            }
            let _ = events.send(Event::Entered(whole.hand_over(), account)).await;
            return Ok(());
        }
        let turn = match &turn {
            Some(turn) => Some(Arc::clone(turn).lock_owned().await),
            None => None,
        };
        let (answer, answers) = oneshot::channel();
        let question = Question { message: asked.message, user, answer };
        if events.send(Event::Asked(question)).await.is_err() {
            return Ok(());
        }
        let Ok((answers, took)) = answers.await else { return Ok(()) };
        if let Some(turn) = turn {
            // The pause applies even if this client disconnects meanwhile.
            tokio::spawn(async move {
                tokio::time::sleep(rest_after(took)).await;
                drop(turn);
            });
        }
        for message in answers {
            send_message(client, &Envelope { serial: asked.serial, message }).await?;
        }
    }
}

/// Receives the next message.
async fn receive(client: &AsyncFd<OwnedFd>) -> io::Result<Result<Envelope, Fault>> {
    let receive = |socket: &OwnedFd| program::receive(socket.as_fd())?.ok_or(io::ErrorKind::WouldBlock.into());
    client.async_io(Interest::READABLE, receive).await
}

async fn send_message(client: &AsyncFd<OwnedFd>, said: &Envelope) -> io::Result<()> {
    let bytes = said.encode();
    let sent = client.async_io(Interest::WRITABLE, |socket| match fd_passing::send(socket, &bytes, &[])? {
        true => Ok(()),
        false => Err(io::ErrorKind::WouldBlock.into()),
    });
    timeout(PATIENCE, sent).await?
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn b15_users_who_take_all_seats_they_get_keep_no_administrator_out() {
        let seats = Seats::default();
        let greedy = |user| std::iter::from_fn(|| seats.take_seat(user)).collect::<Vec<_>>();
        let taken: Vec<_> = [71, 72, 73].map(greedy).into();
        assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [32, 16, 8]);
        assert!(seats.take_seat(74).is_some());
        assert_eq!(greedy(0).len(), CLIENTS_MAX);
        drop(taken);
        assert!(seats.0.lock().unwrap().is_empty(), "seats that nobody has");
    }

    #[test]
    fn b15_user_who_asks_without_end_has_a_share_of_who_answers_and_keeps_nobody_waiting() {
        const TOOK: Duration = Duration::from_millis(30);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let ((events, mut heard), turns, host) =
                (mpsc::channel(16), QuestionLocks::default(), "host".parse::<Name>().unwrap());
            let mut ends = Vec::new();
            for user in [71, 71, 72] {
                let (ours, theirs) = program::connection_socket().unwrap();
                let (version_min, version_max, epoch, boot, name) = (VERSION, VERSION, 0, [0; 16], host.clone());
                let hello = Message::Hello { version_min, version_max, epoch, boot, name };
                for message in [hello, Message::Who { number: 7 }, Message::Who { number: 7 }] {
                    program::send(theirs.as_fd(), 1, message, &[]).unwrap();
                }
                let (events, host, turn) = (events.clone(), host.clone(), turns.of(user));
                ends.push(theirs);
                tokio::spawn(async move { serve_client(ours, user, &host, (&events, turn)).await });
            }
            let (mut last, mut asked) = (None::<Instant>, Vec::new());
            while asked.len() < 6 {
                let next = timeout(Duration::from_secs(20), heard.recv()).await.expect("all are heard in the end");
                let Some(Event::Asked(Question { user, answer, .. })) = next else { panic!("{next:?}") };
                if user == 71 {
                    let since = last.replace(Instant::now()).map(|last| last.elapsed());
                    assert!(since.is_none_or(|since| since >= crate::host::share::SHARE * TOOK), "{since:?}");
                }
                asked.push(user);
                let _ = answer.send((vec![Message::Done {}], TOOK));
            }
            assert!(asked[..2].contains(&72), "another user waits for nobody: {asked:?}");
        });
        let turns = QuestionLocks::default();
        assert!(turns.of(0).is_none(), "an administrator is heard at any time");
        drop(turns.of(71).expect("others have turns"));
        drop(turns.of(72).expect("others have turns"));
        assert_eq!(turns.0.lock().unwrap().len(), 1, "of those who are gone nothing is kept");
    }
}
