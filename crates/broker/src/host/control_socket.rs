// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-15. Programs and tools of this kernel: one datagram a message, a bounded number of clients, a deadline for each.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, oneshot},
    time::timeout,
};
use tombolo_control::{Envelope, Fault, Message, Name, VERSION, code};

use crate::{
    discard,
    endpoint::{broker::may_sit, program},
    fd_passing,
    host::{
        async_fd::{accept, watch},
        event::{Event, Question},
    },
};

/// Most clients at a time, besides those of root and the broker's own user.
const CLIENTS_MAX: usize = 64;
/// How long a client may take to say Hello, and to read an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a client that was refused may take to hear that.
const LINGER: Duration = Duration::from_secs(1);
/// How long a client may say nothing.
const IDLE: Duration = Duration::from_secs(600);

/// Serves clients for as long as the broker hears.
pub async fn serve(listener: OwnedFd, host: Name, events: mpsc::Sender<Event>) -> io::Result<()> {
    let (listener, seats) = (watch(listener)?, Seats::default());
    loop {
        let Ok(client) = accept(&listener).await else {
            // No descriptor, or a client that is gone: the next one may be luckier, a little later.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(user) = fd_passing::user_of(&client) else { continue };
        let Some(seat) = seats.take_seat(user) else {
            turn_away(client, code::QUOTA, format!("user {user} has too many connections: close some"));
            continue;
        };
        let (host, events) = (host.clone(), events.clone());
        tokio::spawn(async move {
            let _ = converse(client, user, &host, &events).await;
            drop(seat);
        });
    }
}

/// A client's socket, whose end waits for nothing. It is empty once it was handed over.
struct Client(Option<AsyncFd<OwnedFd>>);

impl Client {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        // One that cannot be watched is closed all the same.
        let copy = socket.try_clone();
        watch(socket)
            .map(|socket| Self(Some(socket)))
            .inspect_err(|_| copy.iter().for_each(|copy| discard::end(copy.as_fd())))
    }

    fn socket(&self) -> &AsyncFd<OwnedFd> {
        self.0.as_ref().expect("who hands a client over uses it no more")
    }

    /// The socket, for somebody else to go on with.
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

/// How many clients each user has.
#[derive(Clone, Default)]
struct Seats(Arc<Mutex<BTreeMap<u32, usize>>>);

/// A client's seat.
struct Seat(Seats, u32);

impl Seats {
    /// A seat for a client of `user`, if there is one. Nobody keeps an administrator out.
    fn take_seat(&self, user: u32) -> Option<Seat> {
        let own = rustix::process::geteuid().as_raw();
        let rules = |user: u32| user == 0 || user == own;
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let others = taken.iter().filter(|(it, _)| **it != user && !rules(**it)).map(|(_, seats)| seats).sum();
        let mine = taken.entry(user).or_default();
        let own = *mine + discard::waiting_of(user);
        let room = if rules(user) { *mine < CLIENTS_MAX } else { may_sit(own, others, CLIENTS_MAX) };
        *mine += usize::from(room);
        room.then(|| Seat(self.clone(), user))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seats) = taken.get_mut(&self.1) {
            *seats -= 1;
        }
        taken.retain(|_, seats| *seats != 0);
    }
}

/// Tells a program that it is not served, and why; of many at once the last are closed without a word, first of all those of a user
/// who has many.
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

/// Says something and that nothing follows, and waits until the client has gone: what it said meanwhile and nobody took would hide
/// the answer from it if the socket closed.
async fn say_last(client: &AsyncFd<OwnedFd>, said: &Envelope) -> io::Result<()> {
    send_message(client, said).await?;
    rustix::net::shutdown(client, rustix::net::Shutdown::Write)?;
    let gone = async { while receive(client).await.is_ok() {} };
    let _ = timeout(LINGER, gone).await;
    Ok(())
}

/// One client, until it goes or does what it should not.
async fn converse(client: OwnedFd, user: u32, host: &Name, events: &mpsc::Sender<Event>) -> io::Result<()> {
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
        let (answer, answers) = oneshot::channel();
        let question = Question { message: asked.message, user, answer };
        if events.send(Event::Asked(question)).await.is_err() {
            return Ok(());
        }
        let Ok(answers) = answers.await else { return Ok(()) };
        for message in answers {
            send_message(client, &Envelope { serial: asked.serial, message }).await?;
        }
    }
}

/// The next message.
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
}
