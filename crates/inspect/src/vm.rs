// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds channels to other machines, and listeners for them, by asking brokers (B-20).
//!
//! No descriptor leads from outside to a window of a device, so the brokers that gave the windows are asked. They list
//! to each user that user's own channels, and to root all.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use rustix::process::geteuid;
use tombolo_control::{ConnectionEnd, Message, NOBODY, Name, ROW_WORDS, Seen, What, code};
use tombolo_layout::outline;

use crate::{
    broker::{ADMIN_SOCKET, Broker, liveness_word, name_in, programs_socket},
    channel::{self, Channel},
    error::{Error, Result},
    listener::{Listener, ListenerState},
    machine::{Machine, RemoteConnection},
    process::{Process, known_users, name_of},
    segment::Segment,
};

/// Time that a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Channels and listeners that brokers listed.
#[derive(Debug, Default)]
pub struct BrokerRows {
    pub channels: Vec<Channel>,
    pub listeners: Vec<Listener>,
    /// Error of a broker that should have listed something and did not.
    pub silent: Option<String>,
}

/// Asks the brokers of this kernel. It is no error if there is none, or none that serves this user.
pub fn ask_brokers() -> BrokerRows {
    let socket = programs_socket();
    let mut told = BrokerRows::default();
    if let Err(error) = told.ask(&socket) {
        told.silent = Some(format!("{}: {error}", socket.display()));
    }
    told
}

/// Begins a conversation. Returns `None` if no broker is there, or none that serves this user.
fn reach(socket: &Path, enter: Option<&Name>) -> Result<Option<(Broker, Name)>> {
    if !socket.exists() {
        return Ok(None);
    }
    let Ok(broker) = Broker::reach(socket, PATIENCE) else { return Ok(None) };
    let mut name = broker.receive_message()?;
    if let (Message::Hello { .. }, Some(account)) = (&name, enter) {
        broker.send_message(Message::Enter { account: account.clone() })?;
        broker.send_hello()?;
        name = broker.receive_message()?;
    }
    match name {
        Message::Refuse { code: code::DENIED | code::NOT_FOUND, .. } => Ok(None),
        Message::Refuse { code, reason } => Err(Error::Refused { code, why: reason.to_string() }),
        hello => name_in(hello).map(|name| Some((broker, name))),
    }
}

impl BrokerRows {
    fn ask(&mut self, socket: &Path) -> Result<()> {
        // On a host, root sees all accounts through the administrators' socket in the same folder. Other users, and all
        // users in a virtual machine, see what the broker lists to the user who asks.
        let admin = socket.with_file_name(Path::new(ADMIN_SOCKET).file_name().expect("a file's path"));
        if geteuid().is_root()
            && let Some((broker, _)) = reach(&admin, None)?
        {
            // An account that does not answer does not hide the others.
            let mut answered = Ok(());
            for row in broker.ask(Message::List { what: What::Domains })? {
                // A virtual machine has slots, an account has none.
                if let Message::DomainRow { name, slots: 0, .. } = row {
                    let asked = reach(&admin, Some(&name)).and_then(|account| self.ask_broker(account));
                    answered = answered.and(asked);
                }
            }
            return answered;
        }
        self.ask_broker(reach(socket, None)?)
    }

    fn ask_broker(&mut self, broker: Option<(Broker, Name)>) -> Result<()> {
        let Some((broker, domain)) = broker else { return Ok(()) };
        for at in [Seen::Connections, Seen::Listeners] {
            broker.gather_rows(at, |row| self.add_row(&domain, row))?;
        }
        Ok(())
    }

    /// Adds a row of the broker of `domain`.
    fn add_row(&mut self, domain: &Name, row: Message) {
        match row {
            Message::ListenerRow { service, process, user, .. } => {
                let process = whose(process, user);
                self.listeners.push(Listener {
                    address: format!("vm:{domain}/{service}"),
                    state: ListenerState::Listening,
                    uid: user,
                    user: process.user.clone().unwrap_or_else(|| "?".into()),
                    pid: (process.pid != 0).then_some(process.pid),
                    command: (process.pid != 0).then_some(process.command),
                });
            }
            row => {
                let Some((process, connection)) = connection(domain, row) else { return };
                self.channels.push(channel::remote(&process, connection));
            }
        }
    }
}

/// Returns the process on this side of a connection, and the details in the row.
fn connection(domain: &Name, row: Message) -> Option<(Process, RemoteConnection)> {
    let Message::CallRow { at, link, generation, peer, life, service, end, progress, process, user, age, .. } = &row
    else {
        return None;
    };
    let Message::CallRow { own, theirs, storms, own_words, their_words, .. } = &row else { return None };
    let meeting = match end {
        ConnectionEnd::Listened => Some(domain),
        ConnectionEnd::Connected => Some(peer),
        ConnectionEnd::Unknown => None,
    };
    let machine = Machine {
        name: peer.to_string(),
        life: liveness_word(*life),
        link: *link,
        generation: *generation,
        windows: [*own, *theirs],
        storms: (*storms != u32::MAX).then_some(*storms),
    };
    let connection = RemoteConnection {
        address: meeting.map(|name| format!("vm:{name}/{service}")),
        machine,
        row: *at,
        listened: *end == ConnectionEnd::Listened,
        progress: *progress,
        made: (*age != u64::MAX).then(|| SystemTime::now().checked_sub(Duration::from_millis(*age))).flatten(),
        rings: [rings(own_words), rings(their_words)],
    };
    Some((whose(*process, *user), connection))
}

/// Returns the rings that the words of a row describe.
fn rings(words: &[u64; ROW_WORDS]) -> Vec<Segment> {
    let [first, current] = outline::pages(words).map(|page| page.and_then(Segment::stated));
    let Some(first) = first.filter(|first| first.header.generation == 0) else { return Vec::new() };
    let epoch = first.header.epoch;
    [first].into_iter().chain(current.filter(|ring| ring.header.epoch == epoch)).collect()
}

/// Returns the process that a broker named if it has that number and user here, else one of which only the user is
/// known.
fn whose(pid: u32, uid: u32) -> Process {
    let seen = Process::seen(pid).filter(|process| process.uid == Some(uid));
    seen.unwrap_or_else(|| {
        let known = uid != NOBODY;
        Process::unseen(known.then_some(uid), known.then(|| name_of(uid, &known_users())))
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tombolo_control::{Envelope, Life, MESSAGE_MAX, Progress};
    use tombolo_layout::{Features, SegmentHeader, words};
    use tombolo_mem::{OwnWord, create_sealed};

    use super::*;
    use crate::{State, channel::Mode};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// Returns a broker's words for a ring of 4096 bytes whose writer and reader are at these positions.
    fn words(epoch: u64, tail: u64, head: u64) -> [u64; ROW_WORDS] {
        let (segment, fd) = create_sealed("tombolo-ls-b20", 8192).unwrap();
        let (control, _data) = segment.split(4096);
        control.write_header(&SegmentHeader::new(4096, 0, 0, Features::MESSAGES, epoch).encode());
        let open = tombolo_layout::state::State::OPEN.encode();
        for (at, word) in
            [(words::TAIL, tail), (words::HEAD, head), (words::WRITER_STATE, open), (words::READER_STATE, open)]
        {
            control.word(at).store_relaxed(word);
        }
        let read = |at: u64, bytes: &mut [u8]| rustix::io::pread(&fd, bytes, at - 4096).map(drop);
        outline::outline(4096 + 8192, read).unwrap()
    }

    fn row(end: ConnectionEnd, life: Life, progress: Progress) -> Message {
        let (process, user) = (std::process::id(), geteuid().as_raw());
        Message::CallRow {
            at: 7 << 32 | 3,
            link: 7,
            generation: 2,
            peer: name("db"),
            life,
            service: "sql".into(),
            end,
            progress,
            process,
            user,
            age: 1500,
            own: 2 << 20,
            theirs: 1 << 20,
            storms: 4,
            own_words: Box::new(words(0x55_0000_0000, 100, 40)),
            their_words: Box::new(words(0x66_0000_0000, 60, 70)),
        }
    }

    fn channel_of(row: Message) -> Channel {
        let mut told = BrokerRows::default();
        told.add_row(&name("web"), row);
        told.channels.pop().unwrap()
    }

    #[test]
    fn b20_channel_to_a_machine_is_put_together_from_what_the_broker_tells() {
        let channel = channel_of(row(ConnectionEnd::Connected, Life::Running, Progress::Up));
        assert_eq!((channel.address.as_deref(), channel.state), (Some("vm:db/sql"), State::Open));
        assert_eq!((channel.mode, channel.memory), (Mode::Messages, 4 * 4096));
        let machine = channel.machine.unwrap();
        assert_eq!((machine.name.as_str(), machine.life, machine.link, machine.generation), ("db", "running", 7, 2));
        assert_eq!((machine.windows, machine.storms), ([2 << 20, 1 << 20], Some(4)));
        let [Some(own), None] = channel.ends else { panic!("one end is elsewhere") };
        assert_eq!((own.pid, own.listened), (std::process::id(), false));
        assert_eq!(
            (channel.pipes[0].ring, channel.pipes[0].bytes, channel.pipes[0].fill),
            (Some(4096), Some(100), Some(30))
        );
        assert_eq!((channel.pipes[1].bytes, channel.pipes[1].fill), (Some(60), Some(20)));
        assert!(channel.age.is_some_and(|age| (1.4..60.0).contains(&age)), "{:?}", channel.age);
    }

    #[test]
    fn b20_state_of_a_channel_to_a_machine_is_that_of_the_machine_where_that_is_worse() {
        let state = |life, progress| channel_of(row(ConnectionEnd::Listened, life, progress)).state;
        assert_eq!(state(Life::Paused, Progress::Up), State::Paused);
        assert_eq!(state(Life::DomainGone, Progress::Up), State::PeerGone);
        assert_eq!(state(Life::Running, Progress::Closed), State::PeerGone);
        assert_eq!(state(Life::Running, Progress::Asked), State::Opening);
        let unknown = channel_of(row(ConnectionEnd::Unknown, Life::Running, Progress::Up));
        assert_eq!(unknown.address, None, "an earlier broker knew");
    }

    #[test]
    fn b20_process_that_is_another_one_here_is_not_shown_as_the_one_that_was_told() {
        let told = whose(std::process::id(), geteuid().as_raw());
        assert_eq!(told.pid, std::process::id());
        let other = whose(std::process::id(), 54321);
        assert_eq!((other.pid, other.command.as_str(), other.user.as_deref()), (0, "?", Some("54321")));
        assert_eq!(whose(0, NOBODY).user, None);
    }

    /// Starts a broker for one program, which sends a Hello with these versions and then answers each question with
    /// `answer`.
    fn broker(
        versions: (u16, u16),
        answer: impl Fn() -> Vec<Message> + Send + 'static,
    ) -> (tempfile::TempDir, PathBuf) {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        std::thread::spawn(move || {
            let tool = accept(&listener).unwrap();
            let (version_min, version_max) = versions;
            let hello = Message::Hello { version_min, version_max, epoch: 1, boot: [0; 16], name: name("web") };
            let mut said = vec![hello];
            loop {
                let mut question = [0; MESSAGE_MAX];
                if rustix::io::read(&tool, &mut question[..]).unwrap_or(0) == 0 {
                    return;
                }
                for message in said {
                    let _ = rustix::io::write(&tool, &Envelope { serial: 1, message }.encode());
                }
                said = answer();
            }
        });
        (folder, path)
    }

    #[test]
    fn b20_broker_that_answers_one_row_for_ever_is_asked_no_more() {
        let (process, user) = (std::process::id(), geteuid().as_raw());
        let row = move |at| Message::ListenerRow { at, service: name("log"), process, user };
        let (_folder, path) = broker((1, 4), move || vec![row(7), row(3), Message::Done {}]);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut rows = BrokerRows::default();
            let asked = rows.ask_broker(reach(&path, None).unwrap());
            let _ = tell.send((asked.is_ok(), rows.listeners.len()));
        });
        let told = told.recv_timeout(Duration::from_secs(20)).expect("the tool comes back");
        assert_eq!(told, (true, 4), "two rows for each of the two questions");
    }

    #[test]
    fn b6_broker_of_other_versions_is_asked_nothing() {
        let reached = |versions| {
            let (_folder, path) = broker(versions, || panic!("a question"));
            reach(&path, None).map(|broker| broker.is_some())
        };
        assert!(matches!(reached((1, 9)), Ok(true)));
        for versions in [(2, 9), (0, 0), (2, 1)] {
            let refused = reached(versions);
            assert!(matches!(refused, Err(Error::Version { .. })), "{refused:?}");
        }
    }

    #[test]
    fn b20_listener_is_told_with_the_name_of_its_own_machine() {
        let mut told = BrokerRows::default();
        let (process, user) = (std::process::id(), geteuid().as_raw());
        told.add_row(&name("web"), Message::ListenerRow { at: 1, service: name("log"), process, user });
        let [listener] = &told.listeners[..] else { panic!("one") };
        assert_eq!((listener.address.as_str(), listener.pid), ("vm:web/log", Some(process)));
    }
}
