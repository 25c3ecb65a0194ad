-- Gives back many holds, or leaves the line with them. KEYS: counter, watched, held, waited, then L of each name of each. ARGV:
-- the client, the base, the claim; then for each its attempt, and behind it the number of its names if there are several.
local COUNTER, WATCHED, HELD, WAITED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local answers, rest = {}, {}

-- First the plain ones, whose key has their attempt and nothing more: one holder, alone, and nobody watches. While its key
-- is there, its lease is not over.
local values = redis.call('MGET', COUNTER, WATCHED, WAITED, unpack(KEYS, 5))
local freed, seen, at = {}, {}, 5
for i = 1, #ARGV - 3 do
  local attempt, count = ARGV[i + 3], 1
  if #attempt > 32 then attempt, count = string.sub(attempt, 1, 32), tonumber(string.sub(attempt, 33)) end
  local key = KEYS[at]
  if values[at - 1] == attempt and count == 1 and not values[2] and not seen[key] then
    seen[key] = true
    freed[#freed + 1] = key
    answers[i] = 1
  else
    answers[i] = 0
    rest[#rest + 1] = { attempt, i, at, count }
  end
  at = at + count
end
local client, BASE, CLAIM = ARGV[1], ARGV[2], tonumber(ARGV[3])
local slow = {}
if #freed > 0 and not values[3] then
  redis.call('DEL', unpack(freed))
  redis.call('HDEL', HELD, unpack(freed))
elseif #freed > 0 then
  -- Somebody waits. If the first in line wants as plain a lock, it is handed over as it is: see `serve` for the rest.
  local us, fence
  for _, key in ipairs(freed) do
    local line = BASE .. 'line:' .. key
    local member, place = unpack(redis.call('ZPOPMIN', line))
    local who, where = string.sub(member or '', 1, 32), BASE .. 'client:' .. string.sub(member or '', 33)
    local ask = member and redis.call('HGET', where, who)
    if ask and string.byte(ask) == 80 then
      redis.call('HDEL', where, who)
      if not us then
        local time = redis.call('TIME')
        us = time[1] * 1000000 + time[2]
        fence = math.max(values[1] or 0, us - 1)
      end
      fence = fence + 1
      local lease = math.min(struct.unpack('>I4', ask, 82), CLAIM)
      redis.call('SET', key, who, 'PX', lease)
      redis.call('HSET', HELD, key, struct.pack('>c1dddd', 'P', fence, math.floor(us / 1000) + lease, us, 0)
        .. string.sub(ask, 18, 93) .. '\1' .. string.sub(ask, 95))
      if redis.call('PTTL', HELD) < lease then redis.call('PEXPIRE', HELD, 2 * lease) end
      redis.pcall('PUBLISH', 'lockkeeper:wake:' .. string.sub(member, 33), who .. string.format('%.0f %.0f', fence, lease))
    else
      redis.call('DEL', key)
      redis.call('HDEL', HELD, key)
      if ask then redis.call('ZADD', line, place, member) end
      if member then slow[#slow + 1] = key end
    end
  end
  if fence then redis.call('SET', COUNTER, fence) end
end
if #rest == 0 and #slow == 0 then return answers end
local CLIENT = BASE .. 'client:' .. client
