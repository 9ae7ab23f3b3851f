// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes sizes as people do: `64`, `4KiB`, `1MiB`.

/// Parses a size in bytes: digits and optionally `KiB`, `MiB` or `GiB` (also `K`, `M`, `G`; all powers of 1024).
///
/// # Errors
/// Anything else, or more than 64 bits hold, is refused with a sentence that names the text.
///
/// # Examples
/// ```
/// assert_eq!(tombolo_bench::size::parse("4KiB"), Ok(4096));
/// assert!(tombolo_bench::size::parse("4KB").is_err());
/// ```
pub fn parse(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim() {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        unit => return Err(format!("{text:?}: no unit {unit:?}; write bytes, KiB, MiB or GiB")),
    };
    let number: usize = text[..digits].parse().map_err(|_| format!("{text:?} is not a size such as 64 or 4KiB"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is more than 64 bits hold"))
}

/// Formats a size as [`parse`] reads it, in the largest unit that divides it.
pub fn show(bytes: usize) -> String {
    match bytes {
        0 => "0".into(),
        b if b % (1 << 30) == 0 => format!("{}GiB", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}MiB", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}KiB", b >> 10),
        b => b.to_string(),
    }
}

/// Formats a value in three digits, with the largest of `units` that is not greater, or else with the first. Units are
/// given with the value of one, the smallest first.
pub fn in_units(value: f64, units: &[(f64, &str)]) -> String {
    let (one, name) = units.iter().rev().find(|(one, _)| value >= *one).unwrap_or(&units[0]);
    let value = value / one;
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_units_gives_bytes() {
        for (text, bytes) in
            [("64", 64), ("64B", 64), ("4KiB", 4096), ("4K", 4096), ("1MiB", 1 << 20), ("2 GiB", 2 << 30)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn parse_nonsense_is_refused() {
        for text in ["", "KiB", "4KB", "-1", "1.5MiB", "0x10", "99999999999999999999", "99999999999GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn show_is_read_back() {
        for bytes in [0, 1, 64, 1000, 1024, 1536, 4096, 1 << 20, 3 << 30] {
            assert_eq!(parse(&show(bytes)), Ok(bytes));
        }
    }
}
