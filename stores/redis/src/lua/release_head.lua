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
local client, BASE, CLAIM = ARGV[1], ARGV[2], tonumber(ARGV[3])
local slow = {}
if #freed > 0 and redis.call('EXISTS', unpack(lines)) == 0 then
  redis.call('DEL', unpack(freed))
elseif #freed > 0 then
  -- Somebody waits. If the first in line wants as plain a lock, it is handed over as it is: see `serve` for the rest.
  local us, fence
  for i, line in ipairs(lines) do
    local key, meta = freed[2 * i - 1], freed[2 * i]
    local member = redis.call('ZRANGE', line, 0, 0)[1]
    local who, where = string.sub(member or '', 1, 32), BASE .. 'client:' .. string.sub(member or '', 33)
    local ask = member and redis.call('HGET', where, who)
    if ask and string.byte(ask) == 80 then
      redis.call('ZREM', line, member)
      redis.call('HDEL', where, who)
      if not us then
        local time = redis.call('TIME')
        us = time[1] * 1000000 + time[2]
        fence = math.max(redis.call('GET', COUNTER) or 0, us - 1)
      end
      fence = fence + 1
      local lease = math.min(struct.unpack('>I4', ask, 50), CLAIM)
      redis.call('SET', key, who, 'PX', lease)
      redis.call('SET', meta, 'P' .. who .. struct.pack('>dddd', fence, math.floor(us / 1000) + lease, us, 0)
        .. string.sub(ask, 18, 61) .. '\1' .. string.sub(ask, 63), 'PX', lease)
      redis.pcall('PUBLISH', 'lockkeeper:wake:' .. string.sub(member, 33), who)
    else
      redis.call('DEL', key, meta)
      if member then slow[#slow + 1] = key end
    end
  end
  if fence then redis.call('SET', COUNTER, fence) end
end
if #rest == 0 and #slow == 0 then return answers end
local CLIENT = BASE .. 'client:' .. client
