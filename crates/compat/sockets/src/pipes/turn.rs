// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes of an end use a direction in turns.

use std::sync::Mutex;

use rustix::io::Errno;
use tombolo_os::lock::lock;

use super::{Failed, FrozenPipes, Pipes, half::Half};
use crate::{connection::Connection, family::ForkGroup};

impl Pipes {
    /// One turn at a direction. While this process is the only one of its end, its lock is all that it takes.
    #[inline]
    pub(super) fn turn<H: Half, T>(
        &self,
        connection: &Connection,
        half: &Mutex<H>,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        let mut half = lock(half);
        match connection.members.group() {
            Some(family) if !family.is_alone() || *half.behind() => self.shared_turn(connection, family, &mut *half, f),
            _ => {
                let result = f(&mut half);
                half.publish_hints(self);
                self.notify_if(half.take_ring());
                Ok(result)
            }
        }
    }

    #[cold]
    fn shared_turn<H: Half, T>(
        &self,
        connection: &Connection,
        family: &ForkGroup,
        half: &mut H,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        if connection.members.has_departed() {
            return Err(Failed::Os(Errno::BADF));
        }
        // Once alone, always: only this process could make another one, and then it has the lock.
        let alone = family.is_alone();
        let turn = family.turn(H::DIRECTION).map_err(|_| Failed::Os(Errno::CONNRESET))?;
        half.resume(family, turn.record().as_ref())?;
        let result = f(half);
        half.publish_hints(self);
        let record = half.save();
        self.notify_if(half.take_ring());
        turn.leave(&record);
        *half.behind() = !alone;
        Ok(result)
    }

    /// Before a fork, with both directions held still: the child finds them as they are now.
    pub fn hand_on(&self, still: &mut FrozenPipes<'_>, family: &ForkGroup) -> std::io::Result<()> {
        if let Some(base) = still.tx.recalled {
            family.set_recalled(base);
        }
        self.leave(family, &mut *still.tx)?;
        self.leave(family, &mut *still.rx)
    }

    fn leave<H: Half>(&self, family: &ForkGroup, half: &mut H) -> std::io::Result<()> {
        if !*half.behind() {
            let turn = family.turn(H::DIRECTION)?;
            let record = half.save();
            self.notify_if(half.take_ring());
            turn.leave(&record);
            *half.behind() = true;
        }
        Ok(())
    }
}
