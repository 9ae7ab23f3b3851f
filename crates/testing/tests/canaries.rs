// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Canaries: backends with one flaw each, which the suite must find. A suite that passes them checks nothing.

mod flawed;
mod support;

use flawed::{Flaw, Flawed};

/// `FLAW: clause, test` becomes a test that passes if that test of the suite fails on a backend with that flaw, and
/// names that clause as the reason.
macro_rules! canaries {
    ($($name:ident: $flaw:ident, $expected:literal, $test:ident;)*) => {$(
        #[test]
        #[should_panic(expected = $expected)]
        fn $name() {
            tombolo_testing::conformance::$test(&Flawed::new(Flaw::$flaw));
        }
    )*};
}

canaries! {
    d1_canary_dirty_memory: DirtyAtOwner, "D-1: memory shows", d1_memory_after_use_is_zeroed_again;
    d1_canary_dirty_mapping: DirtyAtPeer, "D-1: the peer finds", d1_fresh_memory_is_zeroed_and_exact;
    d1_canary_long_mapping: LongMapping, "D-1: length", d1_fresh_memory_is_zeroed_and_exact;
    d1_canary_memory_that_is_not_shared: CopyAtPeer, "D-1: written after", d1_peer_sees_what_the_owner_writes;
    d1_canary_other_memory: FirstSegmentAgain, "D-1: another", d1_offers_may_be_sent_late_and_in_any_order;
    d2_canary_writable_mapping: CopyAtPeer, "D-2", d2_peers_mapping_is_read_only_for_ever;
    d3_canary_retired_memory_wiped: RetiredIsReused, "D-3", d3_mapped_memory_outlives_its_owner;
    d4_canary_doorbell_without_memory: NotSticky, "D-4", d4_any_number_of_notifications_is_kept;
    d4_canary_lost_notifications: LosesSomeNotifications, "D-4", d4_no_notification_is_lost_between_two_who_sleep;
    d4_canary_end_reported_before_last_notification: EndBeforeNotification, "D-4", d4_last_notification_is_reported_before_the_end;
    d5_canary_notification_that_blocks: NotifyBlocks, "D-5: notify blocks", d5_notifying_never_blocks_though_nobody_drains;
    d5_canary_notification_that_blocks_at_the_end: NotifyBlocks, "D-5: notify blocks", d5_notifying_a_peer_that_is_gone_is_harmless;
    d6_canary_wait_without_deadline: WaitsForEver, "D-6: wait blocks", d6_wait_with_a_past_deadline_returns_at_once;
    d6_canary_wait_beyond_deadline: WaitsForEver, "D-6: wait blocks", d6_wait_without_a_notification_ends_at_its_deadline;
    d6_canary_wait_that_gives_up: WaitsForNothing, "D-6: ended", d6_wait_without_a_notification_ends_at_its_deadline;
    d6_canary_one_sleeper_only: WakesOneSlot, "D-6: one of two", d6_both_slots_are_waited_on_at_once;
    d6_canary_sleeps_through_the_end: SleepsThroughTheEnd, "D-6: wait for a peer", d6_wait_for_ever_ends_when_the_peer_goes;
    d7_canary_drain_that_does_nothing: DrainsNothing, "D-7: a drained doorbell", d7_drain_forgets_what_came_before_and_nothing_after;
    d7_canary_drain_that_comes_late: DrainsLate, "D-7: a drain swallowed", d7_drain_forgets_what_came_before_and_nothing_after;
    d7_canary_silent_descriptor: SilentDescriptors, "D-7: notified, and not", d7_descriptor_is_readable_while_undrained;
    d8_canary_lost_borders: JoinsMessages, "D-8: message of", d8_messages_arrive_whole_apart_and_in_order;
    d8_canary_wrong_order: ReversesMessages, "D-8: message of", d8_messages_arrive_whole_apart_and_in_order;
    d8_canary_long_message_cut: CutsMessages, "D-8", d8_message_too_long_is_refused_by_the_sender;
    d8_canary_recv_that_blocks: RecvBlocks, "D-8: recv blocks", d8_recv_of_nothing_is_none_at_once;
    d8_canary_send_that_blocks: SendBlocks, "D-8: send blocks", d8_full_path_is_a_limit_and_not_a_block;
    d8_canary_messages_lost_when_full: LosesMessages, "D-8", d8_full_path_is_a_limit_and_not_a_block;
    d8_canary_silent_descriptor: SilentDescriptors, "D-8: sent, and not", d8_descriptor_tells_when_there_is_something;
    d8_canary_restless_descriptor: RestlessDescriptors, "D-8: readable, and", d8_descriptor_tells_when_there_is_something;
    d8_canary_messages_lost_at_the_end: EndBeforeMessages, "D-8: ", d8_messages_come_before_the_end;
    d9_canary_any_size_taken: IgnoresMax, "D-9", d9_segment_larger_than_agreed_is_refused;
    d9_canary_memory_from_nowhere: AlwaysMemory, "D-9", d9_message_without_memory_brings_none;
    d10_canary_life_is_eternal: LifeIsEternal, "D-10", d10_peer_that_closed_is_gone;
    d10_canary_sleeps_through_a_kill: SleepsThroughTheEnd, "D-10", d10_killed_peer_is_noticed_and_leaves_what_it_shared;
    d10_canary_dead_while_alive: DeadWhileAlive, "D-10", d10_peer_that_is_there_is_not_gone;
    d11_canary_paused_is_gone: PausedIsGone, "D-11", d11_paused_peer_is_told_from_one_that_is_gone;
    d12_canary_connect_waits_for_a_listener: ConnectTimesOut, "D-12", d12_service_without_listener_is_not_found;
    d12_canary_any_name_will_do: RenamesServices, "D-12", d12_empty_service_is_refused;
    d12_canary_two_listeners: RenamesServices, "D-12", d12_service_in_use_is_refused_to_a_second_listener;
    d12_canary_name_left_behind: LeavesListener, "D-12", d12_dropped_listener_leaves_its_name_free;
    d12_canary_callers_left_waiting: LeavesListener, "D-12", d12_dropped_listener_lets_go_of_those_who_wait;
    d12_canary_stale_name_kept: KeepsStaleNames, "D-12", d12_stale_name_is_taken_over;
    d12_canary_accept_that_blocks: AcceptBlocks, "D-12: accept blocks", d12_accept_of_nobody_is_none_at_once;
    d12_canary_accept_that_listens: AcceptBlocks, "D-12: accept, for", d12_silent_clients_hold_up_nobody;
    d12_canary_callers_mixed_up: AcceptsNewest, "D-12: another", d12_every_caller_gets_a_link_of_its_own;
    d13_canary_retired_memory_reused: RetiredIsReused, "D-13", d13_retired_memory_is_not_reused_while_mapped;
    d13_canary_quarantine_for_ever: QuarantineForEver, "D-13", d13_retired_memory_is_not_reused_while_mapped;
    d13_canary_outlives_in_words_only: OutlivesInWords, "D-13", d13_memory_on_its_way_outlives_its_owner_as_said;
    d14_canary_one_drain_for_all: DrainsAll, "D-14", d14_many_links_at_once_do_not_disturb_each_other;
}

#[test]
fn canary_without_a_flaw_passes() {
    let fixture = Flawed::new(Flaw::None);
    tombolo_testing::conformance::d1_peer_sees_what_the_owner_writes(&fixture);
    tombolo_testing::conformance::d4_no_notification_is_lost_between_two_who_sleep(&fixture);
    tombolo_testing::conformance::d8_messages_arrive_whole_apart_and_in_order(&fixture);
}

#[test]
fn every_test_of_the_suite_has_a_canary() {
    let suite = include_str!("../src/conformance/mod.rs");
    let tests =
        suite.lines().map(str::trim).filter(|line| line.starts_with('d') && line.ends_with(char::is_alphabetic));
    let canaries = include_str!("canaries.rs");
    let without: Vec<_> = tests.filter(|test| !test.contains(' ') && !canaries.contains(test)).collect();
    assert_eq!(without, [""; 0]);
}
