// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves connections back to TCP for a reader or writer that bypasses this library. Also sends over TCP what the peer
//! is owed there, before the connection ends.

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

/// Time for which a call that needs a socket back on TCP waits for the peer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time for which a fork waits for peers in other domains. The program did nothing to its connections, so a late fork
/// is better than one without them.
const FORK_PATIENCE: Duration = Duration::from_secs(20);

/// Moves `fd` to TCP, because the kernel or standard I/O reads or writes it past this library from now on. A socket
/// that is not connected so far stays on TCP permanently.
pub(crate) fn bypassed(fd: RawFd) {
    if inside::has_interrupted() {
        return;
    }
    state::shared(fd);
    if let (Some(process), Some(connection)) = (state::busy(), state::connection(fd)) {
        errno::kept(|| hand_over(process, fd, &connection, Reason::Bypassed));
    }
}

/// Moves a connection back to TCP for a reader or writer that bypasses this library. If the peer does not follow in
/// time, or bytes are in shared memory that nobody will read, ends the connection with an error rather than lose them
/// unnoticed.
pub(crate) fn hand_over(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    hand_over_all(process, &[(fd, Arc::clone(connection))], reason);
}

/// Does the same for several connections, which together wait no longer than one.
pub(crate) fn hand_over_all(process: &Process, all: &[(RawFd, Arc<Connection>)], reason: Reason) {
    hand_over_until(process, all, reason, Instant::now() + PATIENCE, |_, _| Unread::Lost);
}

/// Does the same for the connections that a started program gets. Most programs get most of their descriptors unasked,
/// by the numbers that these had before. Where this endpoint `goes_on`, such connections are lent, and bytes in shared
/// memory stay for this endpoint to read.
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

/// Moves what this endpoint sends to TCP, which a peer that makes calls follows. Unread bytes must not be recalled from
/// a peer that makes none: they would come nowhere, and are here already. Returns whether an answer will tell which
/// kind of peer it is.
fn asks_for_an_answer(process: &Process, fd: RawFd, connection: &Arc<Connection>) -> bool {
    // A connection that was lent before was waited for then.
    let may_answer = !connection.members.is_lent()
        && (connection.transports()[Direction::Out as usize] == Transport::Pipe || find_twin(connection).is_some());
    let _ = connection.for_call(process, fd).turn_back();
    may_answer
}

fn is_answered(process: &Process, fd: RawFd, connection: &Arc<Connection>, deadline: Instant) -> bool {
    // If the peer is in this process, this very thread may be the one in which it would answer.
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

/// Learns, while the caller waits for a peer, whether the link goes away (S-19). The peer may be waiting in the same
/// way.
fn hear_of_links(process: &Process, connection: &Arc<Connection>) {
    if state::is_owner() {
        process.advance(connection);
    }
}

/// Fate of bytes that are in shared memory and cannot go over TCP any more, when their connection moves to TCP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unread {
    /// The connection is reset, because nobody would read the bytes.
    Lost,
    /// The bytes stay where they are, for this endpoint to read. The connection stays too, if it cannot move in time.
    Lent,
    /// This endpoint takes the bytes out, because the memory goes away.
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
        // A connection that was lent before was waited for then.
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

/// Takes connections out of memory that the child of a fork will not have, all together within the time of one.
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

/// Moves a connection back to TCP for something that only the kernel can do with what arrives. This program asked for
/// it, and its calls still come through this library. If the peer makes no call for a while, returns nevertheless: the
/// peer's next call sees the request (S-2).
pub(crate) fn use_kernel(process: &Process, fd: RawFd, connection: &Arc<Connection>) {
    process.leaves(connection, Reason::Usage);
    let is_there = match take_back(process, fd, connection, Reason::Usage, Instant::now() + PATIENCE, Unread::Lost) {
        ReturnStage::Done => true,
        // If the peer sends no more, this program reads in shared memory what the peer has left there (S-2).
        ReturnStage::Long | ReturnStage::Lost => connection.for_call(process, fd).turn_back(),
    };
    if !is_there {
        reset(process, fd, connection);
    }
}

/// Moves what this endpoint sends to TCP, for a send that only the kernel can do. Asks the peer for the same, but waits
/// for the peer only if it has not followed the last move (S-3).
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

/// Makes the close of this endpoint's last descriptor a reset, as TCP would do, because bytes are unread of which the
/// kernel knows nothing. If another program has the socket too, the close does not end the connection, so it is reset
/// now. Otherwise that program would find an end of the stream that is none.
pub(crate) fn reset_at_close(process: &Process, fd: RawFd, connection: &Connection) {
    process.kernel().push(fd); // Bytes that TCP holds back to send with more would be lost.
    if connection.members.is_lent() {
        reset(process, fd, connection);
    } else {
        kernel::reset_at_close(fd);
    }
}

/// Resets a connection that had to be on TCP and is not.
fn reset(process: &Process, fd: RawFd, connection: &Connection) {
    if process.gives_up(connection) {
        process.kernel().reset(fd);
    }
}

/// Asks the peer for TCP from its next call on, without waiting. Bytes in shared memory are read there.
pub(crate) fn ask_for_tcp(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    process.leaves(connection, reason);
    let _ = connection.for_call(process, fd).is_readable(); // Shows the request to the peer.
}

/// Asks the peer for TCP, where the kernel tells the program of whatever comes. Waits for a while until what comes next
/// comes there. A peer that makes no call meanwhile sends nothing, and its next call sees the request.
pub(crate) fn wait_for_tcp(process: &Process, fd: RawFd, connection: &Arc<Connection>, reason: Reason) {
    ask_for_tcp(process, fd, connection, reason);
    if find_twin(connection).is_some() {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    let is_silent = || connection.transports()[Direction::In as usize] == Transport::Pipe && connection.unread() == 0;
    while connection.stage() == Stage::Joined && is_silent() && Instant::now() < deadline {
        // The peer does not notify here, it only moves.
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
        let _ = connection.for_call(process, fd).is_readable();
    }
}

/// Finds the peer of a connection, if it is in this process. This very thread may be the one in which the peer would
/// answer.
fn find_twin(connection: &Connection) -> Option<(RawFd, Arc<Connection>)> {
    state::connections()
        .into_iter()
        .find(|(_, other)| other.identity.addresses() == connection.identity.addresses().map(Tuple::mirrored))
}

/// Moves a connection back to TCP for something that only the kernel can do, and waits for the peer until `deadline`.
/// Returns how far the connection came.
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
            // In a child of vfork the number may be another file by now. Then its parent sends what is owed, later.
            let there = state::is_owner() || process.kernel().tuple(*fd) == other.identity.addresses();
            other.for_call(process, if there { *fd } else { -1 }).send_recalled();
        }
        // The peer does not notify here, it only moves.
        let _ = kernel::poll(&mut [], Some(Duration::from_millis(1)), None);
    }
}

/// Sends what the peer wants from TCP and not from shared memory, before the connection ends. Waits only for a while
/// for a peer that does not read, and then resets the connection.
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
