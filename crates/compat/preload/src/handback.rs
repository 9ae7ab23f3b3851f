// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections go back to TCP, for somebody who reads or writes past this library; and what a peer is owed over TCP goes there
//! before the end.

use std::{
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use tombolo_sockets::{
    Process, Reason,
    connection::{Connection, Direction, ReturnStage, Stage},
    switch::Transport,
    tuple::Tuple,
};

use crate::{errno, inside, kernel, state};

/// How long a call that needs a socket back on TCP waits for the peer.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a fork waits for peers in other domains: the program did nothing to its connections, so it is rather late than without
/// them.
const FORK_PATIENCE: Duration = Duration::from_secs(20);

/// From here on somebody reads or writes `fd` past this library: the kernel, or standard I/O. A socket that is not connected so far
/// stays on TCP for good.
pub(crate) fn bypassed(fd: RawFd) {
    if inside::has_interrupted() {
        return;
    }
    state::shared(fd);
    if let (Some(process), Some(connection)) = (state::busy(), state::connection(fd)) {
        errno::kept(|| hand_over(process, fd, &connection, Reason::Bypassed));
    }
}

/// Moves a connection back to TCP for somebody who reads or writes past this library. Where the peer does not follow in
/// time, or bytes are in shared memory that nobody will read, it ends with an error rather than lose them unnoticed.
pub(crate) fn hand_over(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    hand_over_all(process, &[(fd, Arc::clone(connection))], reason);
}

/// The same for several, which together wait no longer than one.
pub(crate) fn hand_over_all(process: &Process, all: &[(RawFd, Arc<Connection>)], reason: Reason) {
    hand_over_until(process, all, reason, Instant::now() + PATIENCE, |_, _| Unread::Lost);
}

/// The same for what a program that is started gets. Most programs get most of their descriptors unasked, by the numbers that these
/// had before: where this end `goes_on` they are lent, and what is in shared memory stays for it to read.
pub(crate) fn hand_on_all(process: &Process, all: &[(RawFd, Arc<Connection>)], goes_on: impl Fn(&Connection) -> bool) {
    let may_be_lent = |fd, connection: &Connection| fd > libc::STDERR_FILENO && goes_on(connection);
    let unread_is = |fd, connection: &Connection| if may_be_lent(fd, connection) { Unread::Lent } else { Unread::Lost };
    let (unread, mut others): (Vec<_>, Vec<_>) =
        all.iter().cloned().partition(|(fd, connection)| may_be_lent(*fd, connection) && connection.unread() > 0);
    let asked: Vec<_> = unread.iter().map(|(fd, connection)| asks_for_an_answer(process, *fd, connection)).collect();
    let deadline = Instant::now() + PATIENCE;
    for ((fd, connection), asked) in unread.into_iter().zip(asked) {
        if asked && is_answered(process, fd, &connection, deadline) {
            others.push((fd, connection));
        } else {
            ask_for_tcp(process, fd, &connection, Reason::Shared);
            connection.members.lend();
        }
    }
    hand_over_until(process, &others, Reason::Shared, Instant::now() + PATIENCE, unread_is);
}

/// Moves what this end sends to TCP, which a peer that makes calls follows. From one that makes none, what is unread must not be
/// recalled: it would come nowhere, and is here already. Says whether an answer will tell which it is.
fn asks_for_an_answer(process: &Process, fd: RawFd, connection: &Arc<Connection>) -> bool {
    // One that was lent before was waited for then.
    let may_answer = !connection.members.is_lent()
        && (connection.transports()[Direction::Out as usize] == Transport::Pipe || find_twin(connection).is_some());
    let _ = connection.for_call(process, fd).turn_back();
    may_answer
}

fn is_answered(process: &Process, fd: RawFd, connection: &Arc<Connection>, deadline: Instant) -> bool {
    // This very thread may be what a peer in this process would answer in.
    let is_here = find_twin(connection).is_some();
    while !is_here && !connection.for_call(process, fd).turn_back_and_see() {
        if Instant::now() >= deadline {
            return false;
        }
        hear_of_links(process, connection);
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
    }
    true
}

/// Who waits for a peer hears of a link that goes meanwhile (S-19): the peer may wait likewise.
fn hear_of_links(process: &Process, connection: &Arc<Connection>) {
    if state::is_owner() {
        process.advance(connection);
    }
}

/// What becomes of bytes that are in shared memory and cannot go over TCP any more, where a connection goes there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unread {
    /// The connection is reset: nobody would read them.
    Lost,
    /// They stay where they are, for this end to read; so does the connection, if it cannot go in time.
    Lent,
    /// This end takes them out, as the memory goes.
    Kept,
}

fn hand_over_until(
    process: &Process,
    all: &[(RawFd, Arc<Connection>)],
    reason: Reason,
    deadline: Instant,
    unread_is: impl Fn(RawFd, &Connection) -> Unread,
) {
    let all: Vec<_> = all.iter().filter(|(fd, _)| !state::is_owner() || state::is_still(*fd)).collect();
    for (fd, connection) in &all {
        process.leaves(connection, reason);
        if connection.stage() == Stage::Joined {
            connection.for_call(process, *fd).retreat(reason);
        }
    }
    for (fd, connection) in &all {
        let unread = unread_is(*fd, connection);
        // One that was lent before was waited for then.
        let is_lent = unread == Unread::Lent && connection.members.is_lent();
        let deadline = if is_lent { Instant::now() } else { deadline };
        let is_there = connection.ending.is_given_up()
            || take_back(process, *fd, connection, reason, deadline, unread) == ReturnStage::Done;
        match unread {
            _ if is_there => {}
            Unread::Lent => connection.members.lend(),
            Unread::Lost | Unread::Kept => reset(process, *fd, connection),
        }
    }
}

/// Before a fork: connections whose memory the child will not have leave it, together within the time of one.
pub(crate) fn leave_before_fork(process: &Process) {
    let mut all = state::connections();
    all.retain(|(_, connection)| connection.stage() == Stage::Joined && !connection.pipes.are_inherited());
    if all.is_empty() {
        return;
    }
    let deadline = Instant::now() + FORK_PATIENCE;
    hand_over_until(process, &all, Reason::Shared, deadline, |_, _| Unread::Kept);
    for (fd, connection) in &all {
        while !process.lets_go(connection, connection.ending.is_given_up()) {
            if Instant::now() >= deadline {
                reset(process, *fd, connection);
                continue;
            }
            let _ = connection.for_call(process, *fd).retreat(Reason::Shared);
            let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
        }
    }
}

/// Moves a connection back to TCP for something that only the kernel can do with what comes, asked for by this program, whose calls
/// still come here. Where the peer makes no call for a while, this goes on: its next call sees what it is asked for (S-2).
pub(crate) fn use_kernel(process: &Process, fd: RawFd, connection: &Arc<Connection>) {
    process.leaves(connection, Reason::Usage);
    let is_there = match take_back(process, fd, connection, Reason::Usage, Instant::now() + PATIENCE, Unread::Lost) {
        ReturnStage::Done => true,
        // What a peer that sends no more has left in shared memory this program reads there (S-2).
        ReturnStage::Long | ReturnStage::Lost => connection.for_call(process, fd).turn_back(),
    };
    if !is_there {
        reset(process, fd, connection);
    }
}

/// Moves what this end sends to TCP, for a send that only the kernel can do. The peer is asked for the same, and not waited for,
/// unless it has not followed the last move (S-3).
pub(crate) fn send_by_kernel(process: &Process, fd: RawFd, connection: &Arc<Connection>) {
    ask_for_tcp(process, fd, connection, Reason::Usage);
    let deadline = Instant::now() + PATIENCE;
    while !connection.ending.is_given_up() && !connection.for_call(process, fd).turn_back() {
        if Instant::now() >= deadline {
            reset(process, fd, connection);
        }
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
    }
}

/// The last descriptor that this end has is about to be closed, and bytes are unread of which the kernel knows nothing: TCP would
/// reset. Where another program has the socket as well it is not closed, and ends now: that program would find an end that is none.
pub(crate) fn reset_at_close(process: &Process, fd: RawFd, connection: &Connection) {
    process.kernel().push(fd); // What TCP holds back to send it with more would be lost.
    if connection.members.is_lent() {
        reset(process, fd, connection);
    } else {
        kernel::reset_at_close(fd);
    }
}

/// The connection had to be on TCP, and is not.
fn reset(process: &Process, fd: RawFd, connection: &Connection) {
    if process.gives_up(connection) {
        process.kernel().reset(fd);
    }
}

/// Asks the peer for TCP from its next call on, and waits for nobody. What is in shared memory is read there.
pub(crate) fn ask_for_tcp(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    process.leaves(connection, reason);
    let _ = connection.for_call(process, fd).is_readable(); // Says so to the peer.
}

/// Asks the peer for TCP, of which the kernel tells the program whatever comes, and waits for a while until what comes next comes
/// there. A peer that makes no call meanwhile sends nothing, and its next call sees what is asked.
pub(crate) fn wait_for_tcp(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    ask_for_tcp(process, fd, connection, reason);
    if find_twin(connection).is_some() {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    let is_silent = || connection.transports()[Direction::In as usize] == Transport::Pipe && connection.unread() == 0;
    while connection.stage() == Stage::Joined && is_silent() && Instant::now() < deadline {
        // The peer rings for nothing here: it only moves.
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
        let _ = connection.for_call(process, fd).is_readable();
    }
}

/// The other end, where it is in this process: this very thread may be what it would answer in.
fn find_twin(connection: &Connection) -> Option<(RawFd, Arc<Connection>)> {
    state::connections()
        .into_iter()
        .find(|(_, other)| other.identity.addresses() == connection.identity.addresses().map(Tuple::mirrored))
}

/// Moves a connection back to TCP for something that only the kernel can do, waiting for the peer for a moment. Says
/// how far that came.
fn take_back(
    process: &Process,
    fd: RawFd,
    connection: &Arc<Connection>,
    reason: Reason,
    deadline: Instant,
    unread: Unread,
) -> ReturnStage {
    if connection.stage() != Stage::Joined {
        return ReturnStage::Done;
    }
    let twin = find_twin(connection);
    loop {
        let call = connection.for_call(process, fd);
        let stage = call.retreat(reason);
        let is_kept = unread == Unread::Kept && call.keep_unread(stage);
        match stage {
            ReturnStage::Long if Instant::now() < deadline => {}
            ReturnStage::Lost if is_kept => return ReturnStage::Done,
            stage => return stage,
        }
        hear_of_links(process, connection);
        if let Some((fd, other)) = &twin {
            // In a child of vfork the number may be another file by now: then its parent sends what is owed, later.
            let there = state::is_owner() || process.kernel().tuple(*fd) == other.identity.addresses();
            other.for_call(process, if there { *fd } else { -1 }).send_recalled();
        }
        // The peer rings for nothing here: it only moves.
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
    }
}

/// What the peer wants from TCP and not from shared memory goes before the end. That waits for a peer which does not read no
/// longer than a while, and then the end is a reset.
pub(crate) fn drain_before_close(fd: RawFd, connection: &Connection) {
    if connection.stage() != Stage::Joined {
        return;
    }
    let Some(process) = state::busy().filter(|_| state::is_owner()) else { return };
    let deadline = Instant::now() + PATIENCE;
    while connection.for_call(process, fd).send_recalled() {
        if Instant::now() >= deadline {
            if !connection.pipes.are_cut_off() {
                reset(process, fd, connection);
            }
            return;
        }
        let mut one = [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }];
        let _ = kernel::poll(&mut one, Some(Duration::from_millis(10)), None);
    }
}
