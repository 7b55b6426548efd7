// Prints the JSON schemas that zod makes of its types, as one object by names.
//
//     node zod_schemas.mjs FOLDER        FOLDER has node_modules
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const required = createRequire(pathToFileURL(`${process.argv[2]}/`))
const z = await import(pathToFileURL(required.resolve('zod')).href)

const Tree = z.object({ value: z.number(), get kids() { return z.array(Tree) } })
const a = z.object({ t: z.literal('a'), x: z.string() })
const b = z.object({ t: z.literal('b'), y: z.number() })
const types = {
  base64: z.base64(), base64url: z.base64url(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), cuid: z.cuid(), cuid2: z.cuid2(),
  date: z.iso.date(), datetime: z.iso.datetime(), duration: z.iso.duration(), e164: z.e164(), email: z.email(), emoji: z.emoji(),
  guid: z.guid(), hex: z.hex(), hostname: z.hostname(), ipv4: z.ipv4(), ipv6: z.ipv6(), jwt: z.jwt(), ksuid: z.ksuid(),
  nanoid: z.nanoid(), time: z.iso.time(), ulid: z.ulid(), url: z.url(), uuid: z.uuid(), xid: z.xid(),
  ends: z.string().endsWith('x$'), includes: z.string().includes('(q)'), length: z.string().min(2).max(5).trim(),
  lower: z.string().lowercase(), patterns: z.string().regex(/a/).regex(/b/), starts: z.string().startsWith('a.b'),
  around: z.string().regex(/^(?!-)[a-z-]{1,63}(?<!-)$/), template: z.templateLiteral(['a-', z.number(), '-', z.enum(['x', 'y'])]),
  bounds: z.number().gt(1).lt(2), float32: z.float32(), float64: z.float64(), int: z.int(), int32: z.int32(), uint32: z.uint32(),
  multiple: z.number().positive().multipleOf(0.5), any: z.any(), bool: z.boolean(), nothing: z.null(), json: z.json(),
  enum: z.enum(['a', 'b']), literals: z.literal(['a', 1, null]), native: z.enum({ A: 0, B: 'b' }),
  absent: z.object({ a: z.string().optional(), b: z.never().optional() }), catchall: z.object({ a: z.string() }).catchall(z.number()),
  fields: z.object({ b: z.number().default(3), c: z.string().nullable(), d: z.string().nullish(), e: z.string().readonly() }),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })), loose: z.looseObject({ a: z.string() }),
  strict: z.strictObject({ a: z.string() }), tree: Tree, partial: z.partialRecord(z.enum(['a', 'b']), z.number()),
  record: z.record(z.string(), z.number()), recordOf: z.record(z.enum(['a', 'b']), z.number()),
  recordLike: z.record(z.string().regex(/^x/), z.boolean()), array: z.array(z.string()).min(1).max(3), some: z.array(z.int()).nonempty(),
  tuple: z.tuple([z.string(), z.number()]), tupleRest: z.tuple([z.string()], z.number()), discriminated: z.discriminatedUnion('t', [a, b]),
  exclusive: z.xor([z.string(), z.number()]), union: z.union([z.string(), z.number()]),
  described: z.string().describe('d').meta({ title: 'T', examples: ['x'], deprecated: true }),
}
const found = {}
for (const target of ['draft-2020-12', 'draft-7', 'openapi-3.0', 'draft-4'])
  for (const io of ['output', 'input'])
    for (const [name, type] of Object.entries(types)) found[`zod ${name} ${target} ${io}`] = z.toJSONSchema(type, { target, io })
console.log(JSON.stringify(found))
