-- Decides on many lock requests of one kind, each for a lock or for several of one hash slot. KEYS: counter, watched, waited, then
-- L of each name of each request. ARGV: the highest fence seen, the client, the base, the claim; then for all requests: the time to
-- live of their keys (ttl and delay), their head, and their terms (see HOLD) from the owner on; then for each request its attempt, with
-- its terms behind it if they differ.
-- The head: the first byte of a queue entry (PLAIN if the hold will be a plain one); the stage (0: do not wait, 1: enqueue, 2: confirm a hand-off); the number of names; the
-- minimum hold; the fence to raise the hold to; the generation; the time to live of a queue entry.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local floor, BASE, client = tonumber(ARGV[1]), ARGV[3], ARGV[2]
local answers, rest, RELEASED, UNREADABLE, HELD_BEFORE, OTHER_FORMAT = {}, {}, 17, 19, 20, 21
local PLAIN, NONE, CLAIM = 16, string.rep('-', 32), tonumber(ARGV[4])

-- The fast path: a request whose one lock is free and has no queue is granted in the plain pattern.
local known = redis.pcall('MGET', COUNTER, WATCHED, WAITED, BASE .. 'released')
-- The script has written nothing yet. While the slot is being migrated, the last key may be on the other node.
if known.err and string.find(known.err, 'non local key', 1, true) then
  return redis.error_reply('TRYAGAIN The keys of a lock are on two nodes')
elseif known.err then
  error({ err = 'REFUSED ' .. known.err })
end
local last, waited, tombstones = tonumber(known[1] or '0'), known[3], known[4]
local time = redis.call('TIME')
local us = time[1] * 1000000 + time[2]
local px, head, common, at = ARGV[5], ARGV[6], ARGV[7], 4
local kind, stage, count = string.byte(head, 1, 3)
local ends = math.floor(us / 1000) + px
local fence, granted, first = math.max(last, us - 1, floor), false, struct.pack('>ddd', ends, us, 0)
-- While a client watches, holds are stored in the hash, so that the scripts can report when they expire.
local simple = count == 1 and kind == PLAIN and not known[2]
local CLIENT = BASE .. 'client:' .. client

-- Appends a plain request to the queue of a lock that has a plain hold of another attempt. Nil: the slow path decides.
local function enqueue_behind_plain_hold(key, attempt, terms)
  local value = redis.pcall('GET', key)
  local plain = type(value) == 'string' and #value > 114 and string.byte(value, 33) <= 1 and string.sub(value, 66, 97) == NONE
  if not plain or string.sub(value, 1, 32) == attempt then return nil end
  local expires, now = struct.unpack('>d', value, 42), math.floor(us / 1000)
  -- The hold has ended, or the clock was set back.
  if expires <= now or expires > now + struct.unpack('>I4', value, 98) then return nil end
  local queue = BASE .. 'queue:' .. key
  if redis.pcall('HEXISTS', CLIENT, attempt) ~= 0 then return nil end
  -- A full server rejects this.
  local added = redis.pcall('ZADD', queue, fence + 1, attempt .. client)
  if type(added) == 'table' then return nil end
  fence, granted, waited = fence + 1, true, '1'
  redis.call('HSET', CLIENT, attempt, struct.pack('>c1ddc0c0I4', head, us, 0, attempt, terms, CLAIM))
  redis.call('PEXPIRE', CLIENT, (struct.unpack('>I4', head, 17)))
  if redis.call('PTTL', queue) < CLAIM * 2 then redis.call('PEXPIRE', queue, CLAIM * 2) end
  if redis.call('PTTL', WAITED) < CLAIM * 2 then redis.call('SET', WAITED, '1', 'PX', CLAIM * 3) end
  return { 2, key, {}, redis.call('PTTL', key), redis.call('ZCARD', queue), now, fence }
end

for i = 1, #ARGV - 7 do
  local attempt, terms, answer = ARGV[i + 7], common, nil
  if #attempt > 32 then attempt, terms = string.sub(attempt, 1, 32), string.sub(attempt, 33) end
  -- This request was sent before the attempt was released: no caller waits for its reply.
  local released = tombstones and tonumber(redis.call('GET', BASE .. 'released:' .. attempt) or '-1')
  if released and string.byte(head, 16) <= released then
    answer = { RELEASED }
  elseif simple and stage == 2 then
    -- A waiter that was notified of its hand-off confirms: from here on it has its whole ttl. If its fence is not above every
    -- fence that the client has seen, the slow path raises it.
    local value = redis.pcall('GET', KEYS[at])
    if type(value) == 'string' and string.sub(value, 1, 33) == attempt .. '\1' and struct.unpack('>d', value, 34) > floor then
      -- First the write that needs no memory: see `press_on`.
      redis.call('SREM', BASE .. 'unconfirmed:' .. client, attempt)
      redis.call('SET', KEYS[at], attempt .. '\0' .. string.sub(value, 34, 41) .. struct.pack('>d', ends)
        .. string.sub(value, 50), 'PX', px)
      answer = struct.unpack('>d', value, 34)
    end
  elseif simple and not (waited and redis.call('EXISTS', BASE .. 'queue:' .. KEYS[at]) == 1) then
    -- A full server rejects this, and another client may hold the lock: the slow path finds out.
    local value = attempt .. '\0' .. struct.pack('>d', fence + 1) .. first .. terms
    local set = redis.pcall('SET', KEYS[at], value, 'NX', 'PX', px)
    if set and set.ok then
      fence, granted = fence + 1, true
      answer = fence
    end
  end
  if not answer and simple and stage == 1 then
    answer = enqueue_behind_plain_hold(KEYS[at], attempt, terms)
  end
  answers[i] = answer or 0
  if not answer then rest[#rest + 1] = { i, at } end
  at = at + count
end
if granted then redis.call('SET', COUNTER, fence) end
if #rest == 0 then return answers end

