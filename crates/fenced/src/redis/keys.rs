//! Where the mark of a key is: in the same hash slot, whatever braces the key has.

use std::sync::OnceLock;

const PREFIX: &[u8] = b"lockkeeper-fence:";
const SLOTS: u16 = 16_384;

/// The key of the mark of `key`. Different keys have different ones.
///
/// A cluster hashes what stands in the first pair of braces of a key, if there is anything in it, else all of the key.
pub fn mark_key(key: &[u8]) -> Vec<u8> {
    let number;
    let parts: [&[u8]; 4] = if tag(key).is_some() {
        // Its own braces stay the first.
        [b":", key, b"", b""]
    } else if !key.is_empty() && !key.contains(&b'}') {
        [b"{", key, b"}", b""]
    } else {
        // It cannot be put in braces. A number that hashes like it can.
        number = like(slot(key)).to_string();
        [b"{", number.as_bytes(), b"}:", key]
    };
    [PREFIX, &parts.concat()].concat()
}

/// The text in the first pair of braces, if there is anything in it.
fn tag(key: &[u8]) -> Option<&[u8]> {
    let open = key.iter().position(|b| *b == b'{')? + 1;
    let length = key[open..].iter().position(|b| *b == b'}')?;
    Some(&key[open..open + length]).filter(|tag| !tag.is_empty())
}

fn slot(key: &[u8]) -> u16 {
    crc16(tag(key).unwrap_or(key)) % SLOTS
}

/// The first number that hashes to a slot. All of them are found at the first time.
fn like(wanted: u16) -> u32 {
    static NUMBERS: OnceLock<Vec<u32>> = OnceLock::new();
    let numbers = NUMBERS.get_or_init(|| {
        let (mut found, mut missing) = (vec![None; usize::from(SLOTS)], SLOTS);
        for number in 0.. {
            let place = &mut found[usize::from(slot(number.to_string().as_bytes()))];
            missing -= u16::from(place.replace(place.unwrap_or(number)).is_none());
            if missing == 0 {
                break;
            }
        }
        found.into_iter().flatten().collect()
    });
    numbers[usize::from(wanted)]
}

/// CRC-16/XMODEM, as the specification of the cluster says.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let begun = crc ^ (u16::from(*byte) << 8);
        (0..8).fold(begun, |crc: u16, _| if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
    }

    #[test]
    fn every_key_has_a_mark_of_its_own_in_its_slot() {
        let mut keys: Vec<Vec<u8>> = vec![b"".to_vec()];
        // Every word of up to six of these letters.
        for length in 1..=6u32 {
            for nth in 0..5u32.pow(length) {
                keys.push((0..length).map(|at| b"{}a:1"[(nth / 5u32.pow(at) % 5) as usize]).collect());
            }
        }
        let mut marks = HashSet::new();
        for key in &keys {
            let mark = mark_key(key);
            assert_eq!(slot(&mark), slot(key), "{}", String::from_utf8_lossy(key));
            assert!(marks.insert(mark), "{} shares its mark", String::from_utf8_lossy(key));
        }
    }
}
