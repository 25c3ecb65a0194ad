-- Releases many holds, or removes their requests from the queue. KEYS: counter, watched, waited, then L of each name of each.
-- ARGV: the client, the base, the claim, the time to live of a tombstone; then for each its attempt. Unless it has one name and no
-- flags, these bytes follow: flags, the number of its names, its generation, and the highest fence that the release applies to (0: any).
-- A reply is 1, or 0 if there was neither a hold nor a queue entry, 2 if the holders of the lock are unknown, or 3 if
-- another version of Lockkeeper wrote the hold.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local answers, rest, UNREADABLE, OTHER_FORMAT = {}, {}, 2, 3
-- The first byte of the queue entry of this version for a plain hold: see ENTRY.
local PLAIN = 16

-- The fast path: plain holds, whose lock key begins with their attempt, while no client watches. While the key exists, the lease has
-- not ended.
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
-- The poll of the process must not find their hand-offs again.
if #unconfirmed > 0 then redis.call('SREM', BASE .. 'unconfirmed:' .. client, unpack(unconfirmed)) end
if #freed > 0 and not values[3] then
  redis.call('DEL', unpack(freed))
elseif #freed > 0 then
  -- There are queues. If the first waiter requests a plain hold too, it gets the lock here. `serve` handles all other waiters.
  local us, fence
  for _, key in ipairs(freed) do
    local queue = BASE .. 'queue:' .. key
    local member = redis.call('ZRANGE', queue, 0, 0)[1]
    local attempt, process = string.sub(member or '', 1, 32), string.sub(member or '', 33)
    local entry = member and redis.call('HGET', BASE .. 'client:' .. process, attempt)
    if entry and string.byte(entry) == PLAIN then
      redis.call('ZREM', queue, member)
      redis.call('HDEL', BASE .. 'client:' .. process, attempt)
      if not us then
        local time = redis.call('TIME')
        us = time[1] * 1000000 + time[2]
        fence = math.max(values[1] or 0, us - 1)
      end
      fence = fence + 1
      -- The claim of the waiter's client, or its ttl.
      local ttl, claim = struct.unpack('>I4', entry, 82), (struct.unpack('>I4', entry, #entry - 3))
      local lease = math.min(claim, ttl)
      redis.call('SET', key, attempt .. '\1' .. struct.pack('>dddd', fence, math.floor(us / 1000) + lease, us, 0)
        .. string.sub(entry, 50, -5), 'PX', lease)
      local let_in = BASE .. 'unconfirmed:' .. process
      redis.call('SADD', let_in, attempt)
      local kept = 2 * math.max(CLAIM, lease)
      if redis.call('PTTL', let_in) < kept then redis.call('PEXPIRE', let_in, kept) end
      redis.pcall('PUBLISH', 'lockkeeper:wake:' .. process, attempt .. string.format('%.0f %.0f', fence, lease))
    else
      redis.call('DEL', key)
      if member then slow[#slow + 1] = key end
    end
  end
  if fence then redis.call('SET', COUNTER, fence) end
end
if #rest == 0 and #slow == 0 then return answers end
local CLIENT = BASE .. 'client:' .. client
