-- Answers many asks of one kind, each for a lock or for several of one slot. KEYS: counter, watched, held, waited, then L of
-- each name of each ask. ARGV: the highest fence seen, the client, the base, the claim; what the asks have in common: how
-- long their keys are to live (ttl and delay), and their head (what a record begins with, 0 if they do not wait, 1 if they
-- do, 2 if they waited and were called, how many names each has, the minimum, the fence to be raised to), and their terms
-- (see HOLD) from the owner on; and then the attempt of each, with terms of its own behind it if it has others.
local COUNTER, WATCHED, HELD, WAITED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local floor, BASE = tonumber(ARGV[1]), ARGV[3]
local answers, rest = {}, {}

-- First those that find their one lock free, and no line before it: the plain pattern, and the fence with it.
local known = redis.call('MGET', COUNTER, WATCHED, WAITED)
local last, watched, waited = tonumber(known[1] or '0'), known[2], known[3]
local us, ms, fence, confirmed
local px, head, common, at, records = ARGV[5], ARGV[6], ARGV[7], 5, {}
local mark, stage, count = string.byte(head, 1, 3)
local between
for i = 1, #ARGV - 7 do
  local attempt, terms, answer = ARGV[i + 7], common, nil
  if #attempt > 32 then attempt, terms = string.sub(attempt, 1, 32), string.sub(attempt, 33) end
  if count == 1 and stage == 2 then
    -- It was told that it has been let in, and says that it is there: from here on it has the whole of its ttl.
    local meta = last >= floor and redis.call('GET', KEYS[at]) == attempt and redis.call('HGET', HELD, KEYS[at])
    if meta and string.byte(meta) == 80 and string.sub(meta, 34, 65) == attempt then
      local time = redis.call('TIME')
      local ends = math.floor((time[1] * 1000000 + time[2]) / 1000) + px
      redis.call('PEXPIRE', KEYS[at], px)
      redis.call('HSET', HELD, KEYS[at], string.sub(meta, 1, 9) .. struct.pack('>d', ends) .. string.sub(meta, 18, 109)
        .. '\0' .. string.sub(meta, 111))
      confirmed = true
      answer = struct.unpack('>d', meta, 2)
    end
  elseif count == 1 and not (waited and redis.call('EXISTS', BASE .. 'line:' .. KEYS[at]) == 1) then
    -- A server that is full refuses this, and whose the lock is, if it is taken, is found out below.
    local set = redis.pcall('SET', KEYS[at], mark == 80 and attempt or attempt .. '+', 'NX', 'PX', px)
    if set and set.ok then
      if not us then
        local time = redis.call('TIME')
        us = time[1] * 1000000 + time[2]
        ms = math.floor(us / 1000)
        fence = math.max(last, us - 1, floor)
        between = struct.pack('>ddd', ms + px, us, 0)
      end
      fence = fence + 1
      records[#records + 1] = KEYS[at]
      if mark == 80 then
        records[#records + 1] = struct.pack('>c1dc0c0c0', 'P', fence, between, attempt, terms)
      else
        local hold, ttl = struct.unpack('>I4', head, 4), struct.unpack('>I4', terms, 33)
        records[#records + 1] =
          struct.pack('>c1ddddc0c0', 'X', fence, ms + ttl, us, hold > 0 and ms + hold or 0, attempt, terms)
      end
      if watched then
        local _, _, _, _, _, _, info = struct.unpack('>c32I4I4I4BI4c0I2c0', terms)
        redis.pcall('PUBLISH', watched, string.format('granted %.0f %.0f %d ', fence, us, #KEYS[at]) .. KEYS[at] .. info)
      end
      answer = fence
    end
  end
  answers[i] = answer or 0
  if not answer then rest[#rest + 1] = { i, at } end
  at = at + count
end
if fence then
  redis.call('SET', COUNTER, fence)
  redis.call('HSET', HELD, unpack(records))
end
if fence or confirmed then
  -- The records go with the last lease of all, or soon after it. Until then those of locks that ended without a word are
  -- swept out one by one by those who come.
  if redis.call('PTTL', HELD) < tonumber(px) then redis.call('PEXPIRE', HELD, 2 * px) end
end
if fence then
  local one = redis.call('HRANDFIELD', HELD)
  if redis.call('EXISTS', one) == 0 then redis.call('HDEL', HELD, one) end
end
if #rest == 0 then return answers end

local client, CLAIM = ARGV[2], tonumber(ARGV[4])
local CLIENT = BASE .. 'client:' .. client
