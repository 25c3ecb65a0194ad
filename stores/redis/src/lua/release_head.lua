-- Releases many holds, or takes their requests out of the queue. KEYS: counter, watched, waited, then L of each name of each.
-- ARGV: the client, the base, the claim, how long a tombstone stands; then for each its attempt, with these bytes behind it
-- unless it has one name and nothing more is to be said: flags, the number of its names, its generation, and the highest fence
-- of what is meant (0: all). An answer is 1, 0 if nothing of it was there, 2 if it is not known who holds the lock, or 3 if
-- another version of Lockkeeper wrote the hold.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local answers, rest, UNREADABLE, OTHER_FORMAT = {}, {}, 2, 3

-- First the plain ones, whose key begins with their attempt: a single holder, and no client watches. While its key is there,
-- its lease is not over.
local values = redis.call('MGET', COUNTER, WATCHED, WAITED, unpack(KEYS, 4))
local freed, seen, unconfirmed, at = {}, {}, {}, 4
for i = 1, #ARGV - 4 do
  local attempt, flags, count, generation, limit = ARGV[i + 4], 0, 1, 0, 0
  if #attempt > 32 then attempt, flags, count, generation, limit = struct.unpack('>c32BBBd', attempt) end
  local key, value = KEYS[at], values[at]
  if value and string.sub(value, 1, 32) == attempt and count == 1 and flags == 0 and not values[2] and not seen[key] then
    seen[key] = true
    freed[#freed + 1] = key
    if string.byte(value, 33) ~= 0 then unconfirmed[#unconfirmed + 1] = attempt end
    answers[i] = 1
  else
    answers[i] = 0
    rest[#rest + 1] = { attempt, i, at, count, flags, generation, limit }
  end
  at = at + count
end
local client, BASE, CLAIM = ARGV[1], ARGV[2], tonumber(ARGV[3])
local slow = {}
-- Nothing is left of them for the poll of their process to find.
if #unconfirmed > 0 then redis.call('SREM', BASE .. 'unconfirmed:' .. client, unpack(unconfirmed)) end
if #freed > 0 and not values[3] then
  redis.call('DEL', unpack(freed))
elseif #freed > 0 then
  -- There are queues. If the first waiter wants a plain lock too, it is handed over as it is: see `serve` for the rest.
  local us, fence
  for _, key in ipairs(freed) do
    local queue = BASE .. 'queue:' .. key
    local member = redis.call('ZRANGE', queue, 0, 0)[1]
    local who, process = string.sub(member or '', 1, 32), string.sub(member or '', 33)
    local ask = member and redis.call('HGET', BASE .. 'client:' .. process, who)
    if ask and string.byte(ask) == 80 then
      redis.call('ZREM', queue, member)
      redis.call('HDEL', BASE .. 'client:' .. process, who)
      if not us then
        local time = redis.call('TIME')
        us = time[1] * 1000000 + time[2]
        fence = math.max(values[1] or 0, us - 1)
      end
      fence = fence + 1
      local lease = math.min(struct.unpack('>I4', ask, 82), CLAIM)
      redis.call('SET', key, who .. '\1' .. struct.pack('>dddd', fence, math.floor(us / 1000) + lease, us, 0)
        .. string.sub(ask, 50), 'PX', lease)
      local let_in = BASE .. 'unconfirmed:' .. process
      redis.call('SADD', let_in, who)
      if redis.call('PTTL', let_in) < CLAIM * 2 then redis.call('PEXPIRE', let_in, CLAIM * 2) end
      redis.pcall('PUBLISH', 'lockkeeper:wake:' .. process, who .. string.format('%.0f %.0f', fence, lease))
    else
      redis.call('DEL', key)
      if member then slow[#slow + 1] = key end
    end
  end
  if fence then redis.call('SET', COUNTER, fence) end
end
if #rest == 0 and #slow == 0 then return answers end
local CLIENT = BASE .. 'client:' .. client
