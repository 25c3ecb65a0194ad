-- Gives back many holds, or leaves the line with them. KEYS: counter, watched, then L, M and Q of each name of each. ARGV: the
-- client, the base, the claim; then for each its attempt and how many names it has.
local COUNTER, WATCHED = KEYS[1], KEYS[2]
local answers, rest = {}, {}

-- First the plain ones: one holder, alone, and nobody watches. While its key is there, its lease is not over.
local wanted = { WATCHED }
for i = 3, #KEYS, 3 do
  wanted[#wanted + 1] = KEYS[i]
  wanted[#wanted + 1] = KEYS[i + 1]
end
local known = redis.call('MGET', unpack(wanted))
local freed, lines, seen, at = {}, {}, {}, 3
for i = 1, (#ARGV - 3) / 2 do
  local attempt, count = ARGV[2 * i + 2], tonumber(ARGV[2 * i + 3])
  local place = (at - 3) / 3 * 2 + 2
  local value, meta = known[place], known[place + 1]
  if count == 1 and value == attempt and meta and not known[1] and not seen[KEYS[at]] and string.byte(meta) == 80
    and string.sub(meta, 2, 33) == attempt then
    seen[KEYS[at]] = true
    freed[#freed + 1] = KEYS[at]
    freed[#freed + 1] = KEYS[at + 1]
    lines[#lines + 1] = KEYS[at + 2]
    answers[i] = 1
  else
    answers[i] = 0
    rest[#rest + 1] = { i, at, count }
  end
  at = at + 3 * count
end
local waited_for = false
if #freed > 0 then
  redis.call('DEL', unpack(freed))
  waited_for = redis.call('EXISTS', unpack(lines)) > 0
end
if #rest == 0 and not waited_for then return answers end

local client, BASE, CLAIM = ARGV[1], ARGV[2], tonumber(ARGV[3])
local CLIENT = BASE .. 'client:' .. client
