// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker runs in one thread with the test, which sends it every event: the test determines what happens between
//! two events.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType},
    time::{ClockId, clock_gettime},
};
use tokio::sync::mpsc;
use tombolo_control::{Boxes, Envelope, Message, Session};

use super::*;
use crate::{
    config::Config,
    host::{
        descriptor_store,
        event::Event,
        guard::Process,
        memory,
        memory_jobs::{Chore, What},
        qemu::{self, News},
        state::{Quarantined, is_unsaved, now},
    },
};

const TEXT: &str = r#"
[host]
region = "64KiB"
[domain.a]
[domain.b]
[[allow]]
from = "*"
to = "*"
service = "*"
[[link]]
between = ["a", "host"]
[[link]]
between = ["b", "host"]
"#;

/// The guest's side of a device's boxes.
struct Inside(OwnedFd);

impl Boxes for Inside {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        rustix::io::pread(&self.0, bytes, offset as u64).map(drop).map_err(Into::into)
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        rustix::io::pwrite(&self.0, bytes, 4096 + offset as u64).map(drop).map_err(Into::into)
    }
}

/// Boot identifier of the machines' kernels.
const BOOT: [u8; 16] = [1; 16];

struct World {
    broker: Broker,
    events: mpsc::Receiver<Event>,
    /// QEMU's sides of the connections.
    sockets: Vec<OwnedFd>,
    folder: tempfile::TempDir,
}

/// Runs `test` in a runtime, with both machines connected and their links up.
fn play(test: impl FnOnce(&mut World)) {
    play_on(|mut world| test(&mut world));
}

fn play_on(test: impl FnOnce(World)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(TEXT);
        ["a", "b"].into_iter().for_each(|name| world.join(name));
        world.until("the links are up", World::is_up);
        test(world);
    });
}

/// Returns a broker in `folder`, whose descriptor store begins.
fn begin(folder: &Path, text: &str) -> (Broker, mpsc::Receiver<Event>) {
    let config = Config::parse(&folder.join("t"), text).unwrap();
    let began = Instant::now();
    let store = loop {
        match descriptor_store::DescriptorStore::find(folder, false) {
            Ok(store) => break store,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "no descriptor store: {error}"),
        }
        thread::yield_now();
    };
    let (sender, events) = mpsc::channel(1024);
    (Broker::begin(folder, config, store, sender, qemu::ASK_AGAIN).unwrap(), events)
}

impl World {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().to_owned();
        thread::spawn(move || descriptor_store::serve(&place));
        let (broker, events) = begin(folder.path(), text);
        Self { broker, events, sockets: Vec::new(), folder }
    }

    /// Starts another broker with the state that this one leaves.
    fn restart(self) -> Self {
        self.restart_with(TEXT)
    }

    /// As `restart`, with another configuration.
    fn restart_with(mut self, text: &str) -> Self {
        self.broker.journal.save(&self.broker.domains.state).unwrap();
        let Self { broker, sockets, folder, .. } = self;
        drop(broker);
        let (broker, events) = begin(folder.path(), text);
        Self { broker, events, sockets, folder }
    }

    fn join(&mut self, name: &str) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        self.sockets.push(theirs);
        self.handle_event(Event::Joined(name.into(), ours));
        self.send_news(name, News::Running(true));
        self.broker.domains.begin_life(name, BOOT);
        self.broker.reconcile().unwrap();
    }

    fn handle_event(&mut self, event: Event) {
        self.broker.handle_event(event).unwrap();
        self.broker.reconcile().unwrap();
    }

    fn send_news(&mut self, name: &str, news: News) {
        let process = self.broker.domains.state.machines[name].process;
        self.handle_event(Event::Qemu(name.into(), process, news));
    }

    /// The machine's QEMU does everything that it should.
    fn meet(&mut self, name: &str) {
        let wanted = self.broker.domains.vms[name].wanted.borrow().clone();
        let places: BTreeMap<_, _> = wanted.plugs.iter().map(|plug| (plug.name.clone(), "04.0".to_owned())).collect();
        let holds = places.keys().cloned().collect();
        self.send_news(
            name,
            News::Has { version: wanted.version, places, holds, free: 20, trouble: None, process: Process::default() },
        );
    }

    fn serve_accounts(&mut self) {
        let Broker { programs, domains, memory, schedule, .. } = &mut self.broker;
        programs.serve_accounts(domains, memory, schedule).unwrap();
    }

    fn finish_sealing(&mut self, region: (u32, u32, usize), done: io::Result<()>) {
        let Broker { memory, domains, schedule, .. } = &mut self.broker;
        memory.finish_sealing(region, done, domains, schedule);
    }

    /// Takes the messages of the account's broker, as a notification of its doorbell does.
    fn serve_account(&mut self) {
        self.handle_event(Event::Notified("host".into(), 0));
    }

    #[track_caller]
    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !done(self) {
            assert!(began.elapsed() < Duration::from_secs(20), "never: {what}");
            while let Ok(event) = self.events.try_recv() {
                self.handle_event(event);
            }
            self.serve_account();
            self.broker.domains.vms.keys().cloned().collect::<Vec<_>>().iter().for_each(|name| self.meet(name));
            thread::yield_now();
        }
    }

    fn is_up(&self) -> bool {
        let sent = self.broker.domains.locals["host"].guest.sent_links();
        self.broker.domains.state.links.iter().all(|(number, link)| {
            let is_sent = sent.get(number).is_some_and(|sent| sent.generation == link.generation);
            self.broker.domains.is_up(*number) && is_sent
        })
    }

    fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.broker.domains.locals["host"].boxes.load(at, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    /// Returns the number of the message in the account's box.
    fn said_by_account(&self) -> u64 {
        self.word(4096 + 0x40)
    }

    /// Returns whether the account has read all its messages.
    fn is_quiet(&self) -> bool {
        self.broker.domains.locals["host"].guest.has_sent_all() && self.word(0x40) == self.word(4096 + 0x80)
    }

    fn is_held_by_host(&self) -> bool {
        self.broker.domains.state.quarantine.iter().any(|old| old.held_by.contains_key("host"))
    }
}

#[test]
fn b11_released_that_comes_while_the_account_is_told_other_news_counts() {
    play(|world| {
        // Three reboots: memory that is never released would end the link.
        for _ in 0..3 {
            world.until("the account heard all", World::is_quiet);
            let before = world.said_by_account();
            let life = world.broker.domains.state.number();
            world.broker.domains.state.machines.get_mut("a").unwrap().life = life;
            world.broker.reconcile().unwrap();
            assert!(world.is_held_by_host());
            let began = Instant::now();
            while world.said_by_account() == before {
                assert!(began.elapsed() < Duration::from_secs(20), "the account does not let go");
                thread::yield_now();
            }
            // The message is in the box; news on the other link are handled first.
            world.send_news("b", News::Running(false));
            world.send_news("b", News::Running(true));
            world.until("the account gave it back", |world| !world.is_held_by_host());
            world.until("the links are up", World::is_up);
        }
        assert!(world.broker.domains.state.quarantine.is_empty());
    });
}

#[test]
fn b8_storm_that_is_told_while_the_guest_is_told_other_news_is_heard_and_has_consequences() {
    play(|world| {
        let mut boxes = Inside(world.broker.domains.vms["a"].device.memory.try_clone().unwrap());
        let mut guest = Session::begin(tombolo_control::Path::Host, 7, &mut boxes).unwrap();
        let process = world.broker.domains.state.machines["a"].process;
        assert!(matches!(guest.turn(&mut boxes), Ok((Some(tombolo_control::Event::Began), _))));
        let (boot, name) = (BOOT, checked_name("a"));
        guest.queue_message(&Envelope::statement(Message::Hello {
            version_min: 1,
            version_max: 1,
            epoch: 7,
            boot,
            name,
        }));
        for _ in 0..64 {
            guest.turn(&mut boxes).unwrap();
            world.handle_event(Event::Notified("a".into(), process));
        }
        assert!(world.broker.domains.vms["a"].guest.is_there());
        let link =
            world.broker.domains.state.link_between(&super::checked_name("a"), &super::checked_name("host")).unwrap();
        guest.queue_message(&Envelope::statement(Message::Storm { link }));
        guest.turn(&mut boxes).unwrap();
        // The message is in the box; a change of the guest's messages comes first.
        world.broker.domains.config.numbers.insert("a".into(), 5);
        world.broker.reconcile().unwrap();
        assert!(world.broker.domains.vms["a"].stormed_by.contains("host"), "it was heard");
        assert!(world.broker.schedule.pace.is_due(), "its consequences are still to be drawn");
    });
}

#[test]
fn b17_guest_that_notifies_or_begins_sessions_without_end_has_the_broker_reconcile_a_tenth_of_the_time() {
    play(|world| {
        let process = world.broker.domains.state.machines["a"].process;
        world.broker.reconcile().unwrap();
        for _ in 0..1000 {
            world.broker.handle_event(Event::Notified("a".into(), process)).unwrap();
            assert!(!world.broker.schedule.pace.is_due(), "a ring alone has consequences");
        }
        // The guest's messages have consequences, and it sends as many as it can.
        let mut boxes = Inside(world.broker.domains.vms["a"].device.memory.try_clone().unwrap());
        let (began, mut spent, mut longest, mut drawn) = (Instant::now(), Duration::ZERO, Duration::ZERO, 0);
        while drawn < 20 || began.elapsed() < Duration::from_millis(500) {
            assert!(began.elapsed() < Duration::from_secs(60), "consequences are drawn, though seldom");
            let mut guest =
                Session::begin(tombolo_control::Path::Host, 7 + began.elapsed().as_nanos() as u64, &mut boxes).unwrap();
            guest.turn(&mut boxes).unwrap();
            let (version_min, version_max, epoch, boot) = (1, 1, guest.epoch(), BOOT);
            let name = checked_name("a");
            guest.queue_message(&Envelope::statement(Message::Hello { version_min, version_max, epoch, boot, name }));
            for _ in 0..8 {
                world.broker.handle_event(Event::Notified("a".into(), process)).unwrap();
                guest.turn(&mut boxes).unwrap();
                let now = Instant::now();
                let is_drawn = world.broker.schedule.pace.is_due() && world.broker.schedule.pace.rest(now).is_zero();
                world.broker.reconcile_in_turn().unwrap();
                if is_drawn {
                    drawn += 1;
                    longest = longest.max(now.elapsed());
                    spent += now.elapsed();
                }
            }
        }
        let most = began.elapsed() / 5 + 2 * longest;
        assert!(spent <= most, "{drawn} times in {spent:?} of {:?}", began.elapsed());
    });
}

#[test]
fn b11_memory_of_which_an_account_was_never_told_does_not_wait_for_it() {
    play(|world| {
        let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
        // New memory that goes again before the account was told of it: the account knows another generation.
        let generation = world.broker.domains.state.links[&link].generation + 1;
        world.broker.memory.retire_memory(link, &mut world.broker.domains);
        let ends = world.broker.domains.state.links[&link].ends.clone();
        let made = memory::create_pair(link, &ends, 64 << 10, [false, true]).unwrap();
        world.broker.memory.regions.insert(link, made);
        let new = world.broker.domains.state.links.get_mut(&link).unwrap();
        (new.has_memory, new.generation) = (true, generation);
        world.broker.memory.retire_memory(link, &mut world.broker.domains);
        let held: Vec<_> =
            world.broker.domains.state.quarantine.iter().map(|old| old.held_by.contains_key("host")).collect();
        assert_eq!(held, [true, false]);
    });
}

#[test]
fn b10_region_that_cannot_be_sealed_is_told_of_once_and_not_each_time_that_it_is_tried() {
    play(|world| {
        let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
        let state = &world.broker.domains.state.links[&link];
        let region = (link, state.generation, state.side("a").unwrap());
        let fail = |world: &mut World| world.finish_sealing(region, Err(io::ErrorKind::WouldBlock.into()));
        let lines = crate::log::tests::written(false, "info", || (0..3).for_each(|_| fail(world)));
        assert!(lines.len() == 1 && lines[0].contains("the memory of a cannot be sealed yet"), "{lines:?}");
        // A failure after a successful seal is reported again.
        world.finish_sealing(region, Ok(()));
        assert_eq!(crate::log::tests::written(false, "info", || fail(world)).len(), 1);
    });
}

#[test]
fn b17_memory_is_made_beside_the_thread_that_serves_all_others() {
    play(|world| {
        let life = world.broker.domains.state.number();
        world.broker.domains.state.machines.get_mut("a").unwrap().life = life;
        world.broker.reconcile().unwrap();
        let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
        assert!(world.broker.memory.making.contains(&link) && !world.broker.domains.state.links[&link].has_memory);
        // Its domain begins once more before the memory is there: the memory is then for that incarnation.
        let life = world.broker.domains.state.number();
        world.broker.domains.state.machines.get_mut("a").unwrap().life = life;
        world.until("the links are up", World::is_up);
        assert_eq!(world.broker.domains.state.links[&link].lives[0], life);
        assert!(world.broker.memory.making.is_empty());
    });
}

#[test]
fn b17_thread_that_serves_all_others_does_not_spend_the_time_that_memory_takes() {
    play(|world| {
        let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
        let entry = world.broker.domains.state.links.get_mut(&link).unwrap();
        entry.size = 64 << 20;
        let ends = entry.ends.clone();
        // CPU time of this thread alone, so that other threads do not count.
        let spent = |work: &mut dyn FnMut()| {
            let own = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
            let before = own();
            work();
            own() - before
        };
        let all = spent(&mut || drop(memory::create_pair(link, &ends, 64 << 20, [false, true]).unwrap()));
        let ours = spent(&mut || begin_life(world));
        assert!(world.broker.memory.making.contains(&link));
        assert!(ours < all / 4, "{ours:?}, where the memory takes {all:?}");
        world.until("the links are up", World::is_up);
    });
}

#[test]
fn b16_machine_whose_device_cannot_be_written_is_lost_and_no_other() {
    play_on(|world| {
        // An earlier broker left memory that its QEMU sealed.
        let sealed = memory::create("sealed", tombolo_control::DEVICE_LEN).unwrap();
        memory::seal_against_writing(&sealed).unwrap();
        let (process, device) =
            (world.broker.domains.state.machines["a"].process, &world.broker.domains.vms["a"].device);
        let mut descriptors = device.descriptors();
        descriptors[1] = std::os::fd::AsFd::as_fd(&sealed);
        world
            .broker
            .journal
            .store
            .store_descriptors(&crate::host::state::machine_key("a", process), &descriptors)
            .unwrap();
        let world = world.restart();
        assert_eq!(world.broker.domains.vms.keys().collect::<Vec<_>>(), ["b"]);
        assert!(world.broker.domains.is_gone("a") && !world.broker.domains.state.machines.contains_key("a"));
        let b = world.broker.domains.state.link_between(&checked_name("b"), &checked_name("host")).unwrap();
        assert!(world.broker.domains.state.links[&b].has_memory, "what others have stays");
    });
}

/// Returns the number of bytes allocated for a file.
fn allocated(memory: &OwnedFd) -> i64 {
    rustix::fs::fstat(memory).unwrap().st_blocks * 512
}

/// Returns the memory of the link between `a` and the host, by its owner: `a`, and the host.
fn regions(world: &World) -> [OwnedFd; 2] {
    let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
    let side = world.broker.domains.state.links[&link].side("a").unwrap();
    [side, 1 - side].map(|side| world.broker.memory.regions[&link].own[side].try_clone().unwrap())
}

/// The link between `a` and the host gets other memory.
fn begin_life(world: &mut World) {
    let life = world.broker.domains.state.number();
    world.broker.domains.state.machines.get_mut("a").unwrap().life = life;
    world.broker.reconcile().unwrap();
}

#[test]
fn b11_pages_of_an_accounts_region_are_given_back_once_its_programs_let_go_and_a_machines_are_not_touched() {
    play(|world| {
        // The machine has vhost-user backends: its region is not sealed against writing, so its pages could be freed.
        let link = world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).unwrap();
        let ends = world.broker.domains.state.links[&link].ends.clone();
        world.broker.memory.regions.insert(link, memory::create_pair(link, &ends, 64 << 10, [true; 2]).unwrap());
        let [theirs, own] = regions(world);
        begin_life(world);
        world.until("the account gave it back", |world| world.broker.domains.state.quarantine.is_empty());
        world.until("its pages are there no more", |_| allocated(&own) == 0);
        assert_eq!(allocated(&theirs), 64 << 10, "the machine's may be its vhost-user backends'");
    });
}

#[test]
fn b11_b16_pages_that_programs_got_from_an_earlier_broker_stay_whatever_becomes_of_their_link() {
    play_on(|mut world| {
        let kept = regions(&world);
        begin_life(&mut world);
        // No process is left that would report a release.
        let mut world = world.restart();
        world.until("the old memory is out of the state", |world| world.broker.domains.state.quarantine.is_empty());
        world.until("the links are up", World::is_up);
        let again = regions(&world);
        // This time the link itself goes, before the account was told of it.
        let mut world = {
            world.broker.domains.state.links.values_mut().for_each(|link| link.configured = true);
            let text = TEXT.replace("[[link]]\nbetween = [\"a\", \"host\"]\n", "");
            assert_ne!(text, TEXT);
            world.restart_with(&text)
        };
        assert!(world.broker.domains.state.link_between(&checked_name("a"), &checked_name("host")).is_none());
        world.until("that memory is out of the state, too", |world| world.broker.domains.state.quarantine.is_empty());
        // Jobs on memory run one after the other.
        let done = memory::create("done", 64 << 10).map(Arc::new).unwrap();
        let free = Chore { what: What::Free, memory: Arc::clone(&done), region: None };
        assert!(world.broker.memory.chores.ask("host", free));
        world.until("what was asked for before is done", |_| allocated(&done) == 0);
        for memory in kept.iter().chain(&again) {
            assert_eq!(allocated(memory), 64 << 10);
        }
    });
}

#[test]
fn b11_account_that_is_configured_no_more_holds_no_memory() {
    play(|world| {
        let old = Quarantined {
            link: 77,
            generation: 1,
            ends: ["a".into(), "alice".into()],
            bytes: 2 << 20,
            held_by: BTreeMap::from([("alice".to_owned(), 0)]),
            since: now(),
        };
        world.broker.domains.config.accounts.insert("alice".into(), 12345);
        world.serve_accounts();
        world.broker.domains.state.quarantine.push(old);
        world.broker.domains.config.accounts.clear();
        world.serve_accounts();
        world.broker.reconcile().unwrap();
        assert!(world.broker.domains.state.quarantine.is_empty());
    });
}

#[test]
fn b13_reload_tells_who_talks_with_a_qemu_whose_user_it_is_now() {
    play(|world| {
        assert_eq!(*world.broker.domains.vms["a"].user.borrow(), None);
        let path = world.folder.path().join("t");
        std::fs::write(&path, TEXT.replace("[domain.a]", "[domain.a]\nuser = 77")).unwrap();
        world.handle_event(Event::Reload);
        assert_eq!(*world.broker.domains.vms["a"].user.borrow(), Some(77));
        assert_eq!(*world.broker.domains.vms["b"].user.borrow(), None);
    });
}

#[test]
fn b9_qemu_that_cannot_be_served_leaves_no_task_behind() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let world = World::new(TEXT);
        let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = alive();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, _theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let mut device = crate::host::ivshmem::Device::new("a", ours, 2).unwrap();
        // The device cannot be polled, which is found out after the first task began.
        device.host = memory::create("test", 4096).unwrap();
        let (broker, machine) = (&world.broker, crate::host::state::Machine::new(99, 100));
        let begun = crate::host::vm::start(
            "a",
            &machine,
            device,
            &broker.domains.config,
            &broker.journal.folder,
            &broker.schedule.events,
            qemu::ASK_AGAIN,
        );
        assert!(begun.is_err());
        let began = Instant::now();
        while alive() > before {
            assert!(began.elapsed() < Duration::from_secs(20), "{} tasks are left", alive() - before);
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn b17_memory_that_is_not_wanted_any_more_is_dropped_beside_the_thread_that_serves_all_others() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(TEXT);
        let (free, waits) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || waits.recv());
        let made = memory::create_pair(5, &["a".into(), "host".into()], 64 << 10, [false, true]).unwrap();
        let region = Arc::downgrade(&made.own[0]);
        world.handle_event(Event::Made(5, 1, Ok(made)));
        assert!(region.upgrade().is_some(), "it was dropped here");
        free.send(()).unwrap();
        let _ = busy.await;
        let began = Instant::now();
        while region.upgrade().is_some() {
            assert!(began.elapsed() < Duration::from_secs(20), "it is never dropped");
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn b16_machine_whose_task_fails_is_lost_and_no_other_and_what_all_need_ends_the_broker() {
    play(|world| {
        let process = world.broker.domains.state.machines["a"].process;
        world.handle_event(Event::Faulty("a".into(), process - 1));
        assert!(world.broker.domains.vms.contains_key("a"), "that was another QEMU");
        world.handle_event(Event::Faulty("a".into(), process));
        assert!(!world.broker.domains.vms.contains_key("a") && world.broker.domains.vms.contains_key("b"));
        assert!(world.broker.handle_event(Event::Faulty("host".into(), 0)).is_err());
        assert!(world.broker.handle_event(Event::Broken("what all need")).is_err());
    });
}

#[test]
fn b8_b16_doorbell_that_is_not_written_down_is_not_given_and_is_given_later() {
    play(|world| {
        let (number, doorbell) =
            world.broker.domains.state.machines["a"].doorbells.first_key_value().expect("it may ring the host");
        let (number, doorbell) = (*number, doorbell.clone());
        let blocked = world.folder.path().join("state.json.new");
        std::fs::create_dir(&blocked).unwrap();
        world.broker.domains.state.machines.get_mut("a").unwrap().doorbells.remove(&number);
        assert!(is_unsaved(&world.broker.doorbells().give_doorbell("a", doorbell).unwrap_err()));
        assert!(world.broker.domains.state.machines["a"].doorbells.is_empty());
        // The doorbell is still wanted.
        world.broker.reconcile().unwrap();
        assert!(world.broker.domains.state.machines["a"].doorbells.is_empty());
        std::fs::remove_dir(&blocked).unwrap();
        world.until("it may ring again", |world| !world.broker.domains.state.machines["a"].doorbells.is_empty());
    });
}
