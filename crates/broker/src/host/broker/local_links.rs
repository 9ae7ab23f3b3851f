// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of links with the host: what this broker writes of it, and what accounts get of it (V-2).

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    sync::{Arc, PoisonError},
    time::Instant,
};

use crate::{
    host::{accounts::relay::RelayedLink, broker::Broker, event::Event, mapped::Mapped, memory, schedule::RETRY},
    panics,
};

impl Broker {
    /// Maps what this broker writes of a region, beside this thread.
    fn begin_mapping(&mut self, number: u32, side: usize) {
        let (Some(link), Some(memory)) = (self.book.links.get(&number), self.memory.get(&number)) else { return };
        let region = (number, link.generation, side);
        match self.mapping.get(&region) {
            Some(None) => return,
            Some(Some(failed)) if failed.elapsed() < RETRY => return self.schedule.remind_after(RETRY),
            _ => {}
        }
        let (memory, events) = (Arc::clone(&memory.own[side]), self.schedule.events.clone());
        tokio::task::spawn_blocking(move || {
            let mapped = panics::catch_panic(|| Mapped::new(&*memory));
            let _ = events.blocking_send(Event::Mapped(region, mapped));
        });
        self.mapping.insert(region, None);
    }

    /// What this broker writes of a region was mapped.
    pub(crate) fn mapped(&mut self, region: (u32, u32, usize), mapped: io::Result<Mapped>) {
        let (number, generation, side) = region;
        self.mapping.remove(&region);
        let is_current = self.book.has((number, generation));
        match (self.memory.get_mut(&number).filter(|_| is_current), mapped) {
            (Some(memory), Ok(mapped)) => memory.mapped[side] = Some(mapped),
            (Some(_), Err(error)) => {
                tracing::warn!("link {number}: its memory cannot be mapped yet: {error}");
                self.mapping.insert(region, Some(Instant::now()));
            }
            (None, mapped) => memory::drop_aside(mapped),
        }
    }

    /// What the links of accounts are made of.
    pub(crate) fn settle_lines(&mut self) {
        let (mut unmapped, mut is_short) = (Vec::new(), false);
        for (account, local) in &self.locals {
            let mut lines = local.lines.lock().unwrap_or_else(PoisonError::into_inner);
            let links: BTreeMap<u32, u32> =
                self.book.links_of(account).map(|(number, link)| (number, link.generation)).collect();
            let gone = lines.extract_if(.., |(number, generation), _| links.get(number) != Some(generation));
            // To unmap much takes long, too.
            gone.for_each(|(_, line)| memory::drop_aside(line));
            let mut is_new = false;
            for (number, peer) in self.up_links(account) {
                let link = &self.book.links[&number];
                let (Some(side), Some(memory), Some(vm)) =
                    (link.side(account), self.memory.get(&number), self.vms.get(&peer))
                else {
                    continue;
                };
                if let (Entry::Vacant(line), Some(bell)) = (lines.entry((number, link.generation)), &memory.bell) {
                    let Some(own_memory) = memory.mapped[side].clone() else {
                        unmapped.push((number, side));
                        continue;
                    };
                    let copies = || -> io::Result<_> {
                        Ok(RelayedLink {
                            own: memory.own[side].try_clone()?,
                            own_memory,
                            peer: memory.readonly[1 - side].try_clone()?,
                            rings: Arc::clone(vm.device.bell(number)),
                            lane: vm.device.lane(number).clone(),
                            heard: bell.try_clone()?,
                        })
                    };
                    // Without descriptors there are some later.
                    match copies() {
                        Ok(made) => {
                            line.insert(Arc::new(made));
                            is_new = true;
                        }
                        Err(_) => is_short = true,
                    }
                }
            }
            drop(lines);
            if is_new {
                // It may have been told of the link before.
                local.notify();
            }
        }
        unmapped.into_iter().for_each(|(number, side)| self.begin_mapping(number, side));
        if is_short {
            self.schedule.remind_after(RETRY);
        }
    }
}
