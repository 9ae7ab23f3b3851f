// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what an ELF file states about itself, as far as that matters to preloading.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
};

/// Most bytes of a table or of names that are read.
const MOST: u64 = 1 << 20;

/// One file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// Class and machine: 64 or 32 bits, and which processor.
    pub machine: (u8, u16),
    /// Its loader; `None` where it is linked statically.
    pub loader: Option<String>,
    /// Whether Go's compiler made it.
    pub is_go: bool,
}

/// Offset and length of a field, in files of 32 and of 64 bits.
#[derive(Clone, Copy)]
struct Field([(usize, usize); 2]);

const PROGRAMS: Field = Field([(28, 4), (32, 8)]);
const SECTIONS: Field = Field([(32, 4), (40, 8)]);
const PROGRAM_SIZE: Field = Field([(42, 2), (54, 2)]);
const PROGRAM_COUNT: Field = Field([(44, 2), (56, 2)]);
const SECTION_SIZE: Field = Field([(46, 2), (58, 2)]);
const SECTION_COUNT: Field = Field([(48, 2), (60, 2)]);
const NAMES_INDEX: Field = Field([(50, 2), (62, 2)]);
/// Fields of a program header.
const PART_OFFSET: Field = Field([(4, 4), (8, 8)]);
const PART_LEN: Field = Field([(16, 4), (32, 8)]);
/// Fields of a section header.
const SECTION_OFFSET: Field = Field([(16, 4), (24, 8)]);
const SECTION_LEN: Field = Field([(20, 4), (32, 8)]);
const PT_INTERP: u32 = 3;

impl Elf {
    /// Reads the file; `None` where it is no ELF file.
    pub fn read(file: &mut File) -> Option<Self> {
        let mut head = vec![0; 64];
        file.seek(SeekFrom::Start(0)).ok()?;
        // A header of 32 bits has 52 bytes.
        let there = file.take(64).read(&mut head).ok()?;
        if there < 52 || head[..4] != *b"\x7fELF" || !(1..=2).contains(&head[4]) || head[5] != 1 {
            return None;
        }
        let class = head[4];
        let get = |from: &[u8], field: Field| {
            let (at, len) = field.0[usize::from(class) - 1];
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(from.get(at..at + len)?);
            Some(u64::from_le_bytes(bytes))
        };
        let mut part = |at: u64, len: u64| {
            let mut bytes = vec![0; len.min(MOST) as usize];
            file.seek(SeekFrom::Start(at)).ok()?;
            file.read_exact(&mut bytes).ok()?;
            Some(bytes)
        };
        let machine = (class, u16::from_le_bytes([head[18], head[19]]));
        let (size, count) = (get(&head, PROGRAM_SIZE)?.max(4), get(&head, PROGRAM_COUNT)?);
        let programs = part(get(&head, PROGRAMS)?, size * count)?;
        let interpreter = programs.chunks_exact(size as usize).find(|one| one[..4] == PT_INTERP.to_le_bytes());
        let loader = match interpreter {
            Some(one) => {
                let bytes = part(get(one, PART_OFFSET)?, get(one, PART_LEN)?.min(4096))?;
                Some(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
            }
            None => None,
        };
        let mut go = || {
            let size = get(&head, SECTION_SIZE)?.max(4);
            let sections = part(get(&head, SECTIONS)?, size * get(&head, SECTION_COUNT)?)?;
            let names = sections.chunks_exact(size as usize).nth(get(&head, NAMES_INDEX)? as usize)?;
            let names = part(get(names, SECTION_OFFSET)?, get(names, SECTION_LEN)?)?;
            Some(names.split(|byte| *byte == 0).any(|name| name == b".go.buildinfo"))
        };
        // A Go program that was stripped of its sections is not recognised.
        let is_go = go().unwrap_or(false);
        Some(Self { machine, loader, is_go })
    }
}
