// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-15. Programs and tools of this kernel: one datagram a message, a bounded number of clients, a deadline for each.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Semaphore, mpsc, oneshot},
    time::timeout,
};
use tombolo_control::{Fault, MESSAGE_MAX, Message, Name, Path, Said, VERSION, code};

use crate::{
    broker::{Event, Question},
    passing,
};

/// Most clients at a time.
const CLIENTS_MAX: usize = 64;
/// How long a client may take to say Hello, and to read an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a client may say nothing.
const IDLE: Duration = Duration::from_secs(600);

/// Serves clients for as long as the broker hears.
pub async fn serve(listener: OwnedFd, host: Name, events: mpsc::Sender<Event>) -> io::Result<()> {
    let listener = watch(listener)?;
    let seats = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(seat) = Arc::clone(&seats).acquire_owned().await else { return Ok(()) };
        let Ok(client) = accept(&listener).await else {
            // No descriptor, or a client that is gone: the next one may be luckier, a little later.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (host, events) = (host.clone(), events.clone());
        tokio::spawn(async move {
            let _seat = seat;
            let _ = converse(client, &host, &events).await;
        });
    }
}

/// A descriptor that the runtime watches over.
///
/// # Errors
/// It cannot be polled.
#[allow(deprecated, reason = "deprecated for types that lie about their descriptor; `OwnedFd` does not")]
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// The next connection of a listening socket; it does not block.
///
/// # Errors
/// What the system says.
pub async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<OwnedFd> {
    use rustix::net::{SocketFlags, accept_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    listener.async_io(Interest::READABLE, |socket| Ok(accept_with(socket, flags)?)).await
}

/// Tells a program that it is not served, and why; of many at once the last are closed without a word.
pub fn turn_away(program: OwnedFd, why: String) {
    static SEATS: Semaphore = Semaphore::const_new(CLIENTS_MAX);
    let Ok(seat) = SEATS.try_acquire() else { return };
    tokio::spawn(async move {
        let _seat = seat;
        let Ok(program) = watch(program) else { return };
        let said = timeout(PATIENCE, receive(&program)).await;
        let serial = if let Ok(Ok(Ok(said))) = said { said.serial } else { 0 };
        let refuse = Message::Refuse { code: code::DENIED, reason: why.into() };
        let _ = say(&program, &Said { serial, message: refuse }).await;
    });
}

/// One client, until it goes or does what it should not.
async fn converse(client: OwnedFd, host: &Name, events: &mpsc::Sender<Event>) -> io::Result<()> {
    let user = passing::user_of(&client)?;
    let client = watch(client)?;
    let refuse = |serial, code, reason: &str| Said { serial, message: Message::Refuse { code, reason: reason.into() } };
    match timeout(PATIENCE, receive(&client)).await?? {
        Ok(Said { message: Message::Hello { version_min, version_max, .. }, .. }) => {
            if version_min > VERSION || version_max < VERSION {
                return say(&client, &refuse(0, code::VERSION, "this broker speaks version 1")).await;
            }
        }
        Ok(_) => return say(&client, &refuse(0, code::MALFORMED, "Hello comes first")).await,
        Err(fault) => return say(&client, &refuse(0, code::MALFORMED, &fault.to_string())).await,
    }
    let (epoch, boot, name) = (0, [0; 16], host.clone());
    let hello = Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name };
    say(&client, &Said { serial: 0, message: hello }).await?;
    loop {
        let asked = match timeout(IDLE, receive(&client)).await?? {
            Ok(asked) => asked,
            Err(fault) => return say(&client, &refuse(0, code::MALFORMED, &fault.to_string())).await,
        };
        let (answer, answers) = oneshot::channel();
        let question = Question { message: asked.message, user, answer };
        if events.send(Event::Asked(question)).await.is_err() {
            return Ok(());
        }
        let Ok(answers) = answers.await else { return Ok(()) };
        for message in answers {
            say(&client, &Said { serial: asked.serial, message }).await?;
        }
    }
}

/// The next message. Descriptors are not wanted, and closed.
async fn receive(client: &AsyncFd<OwnedFd>) -> io::Result<Result<Said, Fault>> {
    let mut buffer = [0; MESSAGE_MAX];
    let (len, descriptors) =
        client.async_io(Interest::READABLE, |socket| passing::receive(socket, &mut buffer)).await?;
    if !descriptors.is_empty() {
        // To close one may take as long as its file system likes.
        tokio::task::spawn_blocking(move || drop(descriptors));
        return Err(io::Error::other("descriptors that nobody asked for (B-15)"));
    }
    match len {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        len => Ok(Said::decode(Path::Socket, buffer.get(..len).unwrap_or(&[]))),
    }
}

async fn say(client: &AsyncFd<OwnedFd>, said: &Said) -> io::Result<()> {
    let bytes = said.encode();
    let sent = client.async_io(Interest::WRITABLE, |socket| match passing::send(socket, &bytes, &[])? {
        true => Ok(()),
        false => Err(io::ErrorKind::WouldBlock.into()),
    });
    timeout(PATIENCE, sent).await?
}
