//! All keys of a Redis server as text, for fixtures of stored formats.

use std::net::SocketAddr;

use super::redis_call;

/// A key and its value: the parts of a string, a hash (field, value, …), a sorted set (member, score, …), a list or a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisKey {
    /// The type as `TYPE` names it.
    pub kind: String,
    /// The name of the key.
    pub key: Vec<u8>,
    /// The parts of the value.
    pub parts: Vec<Vec<u8>>,
}

/// Returns every key, sorted, as words in which `%XX` is a byte. The parts of a hash and of a set are sorted too.
const SNAPSHOT: &str = r"
local function encoded(s)
  if s == '' then return '%' end
  return (string.gsub(s, '[^!-$&-~]', function(c) return string.format('%%%02x', string.byte(c)) end))
end
local lines, keys = {}, redis.call('KEYS', '*')
table.sort(keys)
for _, key in ipairs(keys) do
  local kind, words = redis.call('TYPE', key).ok, {}
  if kind == 'string' then words = { encoded(redis.call('GET', key)) }
  elseif kind == 'zset' then for i, part in ipairs(redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')) do words[i] = encoded(part) end
  elseif kind == 'list' then for i, part in ipairs(redis.call('LRANGE', key, 0, -1)) do words[i] = encoded(part) end
  elseif kind == 'set' then
    for i, part in ipairs(redis.call('SMEMBERS', key)) do words[i] = encoded(part) end
    table.sort(words)
  elseif kind == 'hash' then
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do words[#words + 1] = encoded(all[i]) .. ' ' .. encoded(all[i + 1]) end
    table.sort(words)
  end
  lines[#lines + 1] = kind .. ' ' .. encoded(key) .. ' ' .. table.concat(words, ' ')
end
return table.concat(lines, '\n')";

/// Writes one key. ARGV: the kind, its time to live in ms, and the words.
const RESTORE: &str = r"
local function decoded(s)
  return (string.gsub(s == '%' and '' or s, '%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end))
end
local key = decoded(KEYS[1])
for i = 3, #ARGV, ARGV[1] ~= 'string' and ARGV[1] ~= 'list' and ARGV[1] ~= 'set' and 2 or 1 do
  local one, two = decoded(ARGV[i]), decoded(ARGV[i + 1] or '')
  if ARGV[1] == 'string' then redis.call('SET', key, one)
  elseif ARGV[1] == 'zset' then redis.call('ZADD', key, two, one)
  elseif ARGV[1] == 'list' then redis.call('RPUSH', key, one)
  elseif ARGV[1] == 'set' then redis.call('SADD', key, one)
  else redis.call('HSET', key, one, two) end
end
if ARGV[2] ~= '0' then redis.call('PEXPIRE', key, ARGV[2]) end";

impl RedisKey {
    /// All keys of a server.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn all(addr: SocketAddr) -> Vec<RedisKey> {
        let text = redis_call(addr, &["EVAL", SNAPSHOT, "0"]).expect("the server answers");
        RedisKey::parse(&text)
    }

    /// Keys from text, one in each line.
    ///
    /// # Panics
    /// If it is no such text.
    pub fn parse(text: &str) -> Vec<RedisKey> {
        let key = |line: &str| {
            let mut words = line.split(' ');
            let kind = words.next().expect("a kind").to_owned();
            let key = decode(words.next().expect("a key"));
            RedisKey { kind, key, parts: words.map(decode).collect() }
        };
        text.lines().map(key).collect()
    }

    /// The text of [`RedisKey::parse`].
    pub fn print(keys: &[RedisKey]) -> String {
        let line = |key: &RedisKey| {
            let words = std::iter::once(&key.key).chain(&key.parts).map(|part| encode(part));
            std::iter::once(key.kind.clone()).chain(words).collect::<Vec<_>>().join(" ") + "\n"
        };
        keys.iter().map(line).collect()
    }

    /// Writes the key to a server. `ttl_ms`: 0 for ever.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn restore(&self, addr: SocketAddr, ttl_ms: u64) {
        let (key, ttl) = (encode(&self.key), ttl_ms.to_string());
        let words: Vec<String> = self.parts.iter().map(|part| encode(part)).collect();
        let mut command = vec!["EVAL", RESTORE, "1", &key, &self.kind, &ttl];
        command.extend(words.iter().map(String::as_str));
        redis_call(addr, &command).expect("the server answers");
    }
}

fn encode(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "%".into();
    }
    let byte = |byte: &u8| match byte {
        b'!'..=b'~' if *byte != b'%' => char::from(*byte).to_string(),
        _ => format!("%{byte:02x}"),
    };
    bytes.iter().map(byte).collect()
}

fn decode(word: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), word.as_bytes());
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let hex = [*high, *low];
                let hex = std::str::from_utf8(&hex).expect("two digits");
                bytes.push(u8::from_str_radix(hex, 16).expect("two digits"));
                rest = tail;
            }
            (b'%', _) => rest = tail,
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}
