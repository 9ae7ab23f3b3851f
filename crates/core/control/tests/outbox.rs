// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two sessions over two pages, and a peer that writes arbitrary bytes into its own.

use std::{cell::RefCell, io, rc::Rc};

use proptest::prelude::*;
use tombolo_control::{BOX_LEN, Boxes, Envelope, Event, Message, Path, QUEUE_MAX, Session};

type Page = Rc<RefCell<[u8; BOX_LEN]>>;

struct Pages {
    own: Page,
    theirs: Page,
}

impl Boxes for Pages {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.theirs.borrow()[offset..offset + bytes.len()]);
        Ok(())
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.own.borrow_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Returns the pages of two sides.
fn pages() -> (Pages, Pages) {
    let (a, b): (Page, Page) = (Rc::new(RefCell::new([0; BOX_LEN])), Rc::new(RefCell::new([0; BOX_LEN])));
    (Pages { own: Rc::clone(&a), theirs: Rc::clone(&b) }, Pages { own: b, theirs: a })
}

fn storm(link: u32) -> Envelope {
    Envelope::statement(Message::Storm { link })
}

/// Lets both sides take turns until nothing changes. Returns the events of each.
fn run_until_idle(a: &mut Session, at_a: &mut Pages, b: &mut Session, at_b: &mut Pages) -> (Vec<Event>, Vec<Event>) {
    let (mut heard_a, mut heard_b) = (Vec::new(), Vec::new());
    for _ in 0..10_000 {
        let (event_a, changed_a) = a.turn(at_a).unwrap();
        let (event_b, changed_b) = b.turn(at_b).unwrap();
        heard_a.extend(event_a);
        heard_b.extend(event_b);
        if !changed_a && !changed_b {
            return (heard_a, heard_b);
        }
    }
    panic!("never at rest");
}

fn begin(epoch: u64, pages: &mut Pages) -> Session {
    Session::begin(Path::Host, epoch, pages).unwrap()
}

#[test]
fn b3_box_stands_as_the_table_says() {
    let (mut at_a, _) = pages();
    begin(0x0102, &mut at_a);
    let page = at_a.own.borrow();
    assert_eq!(page[..8], *b"TOMBOLO\0");
    assert_eq!((page[8], page[0x10], page[0x11], page[0x40], page[0x80]), (1, 2, 1, 0, 0));
}

#[test]
fn b5_messages_arrive_once_and_in_order() {
    let (mut at_a, mut at_b) = pages();
    let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
    let (heard_a, heard_b) = run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    assert_eq!((heard_a, heard_b), (vec![Event::Began], vec![Event::Began]));
    // More messages than there are numbers.
    for hundred in (0..700).step_by(100) {
        for link in hundred..hundred + 100 {
            assert!(a.queue_message(&storm(link)) && b.queue_message(&storm(1000 + link)));
        }
        let (heard_a, heard_b) = run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
        let said = |from: u32| (from..from + 100).map(|link| Event::Said(storm(link))).collect::<Vec<_>>();
        assert_eq!((heard_b, heard_a), (said(hundred), said(1000 + hundred)));
    }
    assert_eq!(u32::from(at_a.own.borrow()[0x40]), 700 % 255);
}

#[test]
fn b4_side_that_begins_anew_gets_nothing_of_the_time_before() {
    let (mut at_a, mut at_b) = pages();
    let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
    run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    // Three are sent before, of which one is in the box; at most that one was taken.
    (1..=3).for_each(|link| assert!(b.queue_message(&storm(link))));
    b.turn(&mut at_b).unwrap();
    let mut a = begin(3, &mut at_a);
    let (heard_a, heard_b) = run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    assert_eq!((heard_a, heard_b), (vec![Event::Began], vec![Event::Began]));
    assert!(b.queue_message(&storm(4)) && a.queue_message(&storm(5)));
    let (heard_a, heard_b) = run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    assert_eq!((heard_a, heard_b), (vec![Event::Said(storm(4))], vec![Event::Said(storm(5))]));
}

#[test]
fn b5_peer_that_takes_nothing_costs_a_bounded_queue_and_is_given_up() {
    let (mut at_a, mut at_b) = pages();
    let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
    run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    let room = (0..).take_while(|_| a.queue_message(&storm(0))).count();
    assert_eq!(room, QUEUE_MAX);
    assert!(a.is_broken() && !a.queue_message(&storm(0)));
    assert_eq!(a.turn(&mut at_a).unwrap(), (None, false));
    // Its messages are read again once it begins anew.
    let mut b = begin(7, &mut at_b);
    run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
    assert!(a.queue_message(&storm(9)));
    assert_eq!(run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b).1, vec![Event::Said(storm(9))]);
}

#[test]
fn b5_numbers_out_of_turn_break_the_clause_and_silence_the_peer() {
    for (at, number) in [(0x40, 2u64), (0x40, u64::MAX), (0x80, 1), (0x80, u64::MAX)] {
        let (mut at_a, mut at_b) = pages();
        let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
        run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
        at_b.store(at, &number.to_le_bytes()).unwrap();
        match a.turn(&mut at_a).unwrap().0 {
            Some(Event::Broke(fault)) => assert_eq!(fault.clause, "B-5"),
            other => panic!("{number} at {at:#x}: {other:?}"),
        }
        at_b.store(at, &0u64.to_le_bytes()).unwrap();
        assert!(!a.queue_message(&storm(1)) && a.turn(&mut at_a).unwrap() == (None, false));
    }
}

#[test]
fn b4_box_that_answers_another_epoch_is_not_believed() {
    let (mut at_a, mut at_b) = pages();
    let mut a = begin(1, &mut at_a);
    begin(2, &mut at_b);
    a.turn(&mut at_a).unwrap();
    at_b.store(0x40, &1u64.to_le_bytes()).unwrap();
    at_b.store(0x100, &storm(1).encode()).unwrap();
    at_b.store(0x18, &99u64.to_le_bytes()).unwrap();
    assert_eq!(a.turn(&mut at_a).unwrap(), (None, false));
    at_b.store(0x18, &1u64.to_le_bytes()).unwrap();
    assert_eq!(a.turn(&mut at_a).unwrap(), (Some(Event::Said(storm(1))), true));
}

/// Pages whose other side begins anew between two loads.
struct Interrupted<'a> {
    pages: &'a mut Pages,
    other: &'a mut Pages,
    loads_left: usize,
}

impl Boxes for Interrupted<'_> {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        if self.loads_left == 0 {
            begin(77, self.other);
        }
        self.loads_left = self.loads_left.wrapping_sub(1);
        self.pages.load(offset, bytes)
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.pages.store(offset, bytes)
    }
}

#[test]
fn b4_peer_that_begins_anew_at_any_moment_of_a_look_is_not_taken_for_a_liar() {
    for loads_left in 0..6 {
        let (mut at_a, mut at_b) = pages();
        let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
        run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
        for link in 0..5 {
            assert!(a.queue_message(&storm(link)) && b.queue_message(&storm(link)));
        }
        run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
        let mut boxes = Interrupted { pages: &mut at_a, other: &mut at_b, loads_left };
        let event = a.turn(&mut boxes).unwrap().0;
        assert!(matches!(event, None | Some(Event::Began)), "{loads_left}: {event:?}");
        assert!(!a.is_broken());
    }
}

proptest! {
    #[test]
    fn b4_b5_peer_that_scribbles_in_its_box_costs_one_answer_a_turn(
        lies in proptest::collection::vec((0..32usize, any::<u64>(), 0u64..4), 1..200),
    ) {
        let (mut at_a, mut at_b) = pages();
        let (mut a, mut b) = (begin(1, &mut at_a), begin(2, &mut at_b));
        run_until_idle(&mut a, &mut at_a, &mut b, &mut at_b);
        for (at, wild, tame) in lies {
            let number = if at % 3 == 0 { wild } else { tame };
            at_b.store([0x10, 0x18, 0x40, 0x80, 0x100, 0x104, 0x108, 0x110][at % 8], &number.to_le_bytes()).unwrap();
            a.queue_message(&storm(7));
            a.turn(&mut at_a).unwrap();
        }
    }
}
